"""The shape functions of the overrideable operators on symbolic sizes, backed and unbacked."""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support import Case, cases
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv

import torch_convfix

overrideable = torch.ops.aten.convolution_overrideable
backward = torch.ops.aten.convolution_backward_overrideable

Size = int | torch.SymInt


@pytest.fixture(autouse=True)
def enabled():
    with torch_convfix.enabled("cpu"):
        yield


class Symbols:
    """Symbolic sizes with the values that they will turn out to have."""

    def __init__(self, backed: bool) -> None:
        self.backed = backed
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment)
        # torch 2.9 compares strides to cache a result, which no unbacked size stands.
        self.mode.cache_enabled = False
        self.values: dict[object, int] = {}

    def new(self, value: int) -> torch.SymInt:
        if self.backed:
            source = ConstantSource(f"s{len(self.values)}")
            symbol = self.environment.create_symbol(
                value, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True
            )
            size = self.environment.create_symintnode(symbol, hint=value, source=source)
        else:
            size = self.environment.create_unbacked_symint()
            torch._check(size >= 0)
        self.values[size.node.expr] = value
        return size

    def tensor(self, sizes: tuple[int, ...], symbolic: frozenset[int]) -> torch.Tensor:
        return torch.empty([self.new(s) if i in symbolic else s for i, s in enumerate(sizes)])

    def value(self, size: Size) -> int:
        return int(size.node.expr.subs(self.values)) if isinstance(size, torch.SymInt) else size


def parameters(case: Case) -> tuple:
    spatial = (case.stride, case.padding, case.dilation)
    return (*spatial, case.transposed, case.output_padding, case.groups)


def unknown(size: Size) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def subsets(number: int) -> list[frozenset[int]]:
    every = range(number)
    return [frozenset(s) for r in range(number + 1) for s in itertools.combinations(every, r)]


def real_shape(case: Case) -> torch.Size:
    return case.apply(*case.inputs(torch.float32)).shape


def check(
    case: Case,
    want: torch.Size,
    of_input: frozenset[int],
    of_weight: frozenset[int],
    backed: bool,
) -> None:
    symbols = Symbols(backed)
    with symbols.mode:
        fx = symbols.tensor(case.input_size, of_input)
        fw = symbols.tensor(case.weight_size, of_weight)
        fb = torch.empty(want[1]) if case.bias else None
        y = overrideable(fx, fw, fb, *parameters(case))
        gradients = backward(y, fx, fw, *parameters(case), [True, True, True])
    assert [symbols.value(s) for s in y.shape] == list(want)
    got = [[symbols.value(s) for s in g.shape] for g in gradients]
    assert got == [list(case.input_size), list(case.weight_size), [want[1]]]
    assert unknown(y.shape[0]) == (0 in of_input)
    for i in range(2, len(want)):
        # That the kernel fits into a known input may bound an unknown one to a single size.
        assert unknown(y.shape[i]) >= (i in of_input)
        assert unknown(y.shape[i]) <= (i in of_input or i in of_weight)


explicit = cases(batched=True).filter(lambda case: not isinstance(case.padding, str))


@pytest.mark.slow
def test_any_subset_of_dimensions(case_share):
    @hypothesis.settings(max_examples=int(300 * case_share))
    @hypothesis.given(explicit, st.data())
    def run(case, data):
        of_input = data.draw(st.sampled_from(subsets(len(case.input_size))))
        of_weight = data.draw(st.sampled_from(subsets(len(case.weight_size))))
        want = real_shape(case)
        for backed in (True, False):
            check(case, want, of_input, of_weight, backed)

    run()


SMALL = [
    Case((2, 4, 8, 9), (6, 2, 3, 2), True, (2, 1), (1, 0), (1, 2), 2),
    Case((2, 4, 5, 6), (4, 3, 3, 2), True, (3, 2), (1, 0), (1, 4), 2, True, (2, 3)),
]


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("backed", [True, False])
def test_every_subset_of_dimensions(case, backed):
    want = real_shape(case)
    for of_input, of_weight in itertools.product(subsets(4), (frozenset(), frozenset(range(4)))):
        check(case, want, of_input, of_weight, backed)


def test_a_known_misfit_is_refused_at_once():
    symbols = Symbols(backed=False)
    with symbols.mode:
        x = symbols.tensor((2, 5, 8, 8), frozenset({0, 2, 3}))
        w = torch.empty(4, 4, 3, 3)
        with pytest.raises(RuntimeError, match="input must have 4 channels"):
            overrideable(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def test_what_is_not_known_is_asserted():
    """The unknown channels must be 4: the traced program will check it."""
    symbols = Symbols(backed=False)
    with symbols.mode:
        x = symbols.tensor((2, 4, 8, 8), frozenset({1}))
        overrideable(x, torch.empty(4, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    asserts = itertools.chain(*symbols.environment.deferred_runtime_asserts.values())
    assert any("Eq" in str(a.expr) for a in asserts)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.9"), reason="later versions of torch can, and so can ours"
)
def test_the_cache_of_torch_2_9_refuses_such_sizes_itself():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        h, w = environment.create_unbacked_symint(), environment.create_unbacked_symint()
        with pytest.raises(GuardOnDataDependentSymNode):
            torch.empty([2, 4, (h - 1) // 2 + 1, w - 4])


class Overrideable(torch.nn.Module):
    """A convolution as XLA gets it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        _, w, b = case.inputs(torch.float32)
        self.weight, self.bias = torch.nn.Parameter(w), torch.nn.Parameter(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return overrideable(x, self.weight, self.bias, *parameters(self.case))


class Functional(Overrideable):
    """The same, through torch.nn.functional."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.case.apply(x, self.weight, self.bias)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("module", [Overrideable, Functional])
def test_export_with_dynamic_batch_height_and_width(module, case):
    # Sizes whose result could be 1 are another program to torch.export.
    dynamic = {0: Dim("batch", min=2), 2: Dim("height", min=8), 3: Dim("width", min=16)}
    device = "meta" if module is Overrideable else "cpu"  # it has no kernel on the CPU
    x = torch.empty(3, 4, 13, 17, device=device)
    program = export(module(case).to(device), (x,), dynamic_shapes=(dynamic,))
    (output,) = (n for n in program.graph.nodes if n.op == "output")
    batch, channels, height, width = output.args[0][0].meta["val"].shape
    assert unknown(batch) and unknown(height) and unknown(width)
    assert channels == 6
    run = program.module()
    for size in ((2, 4, 8, 16), (5, 4, 11, 20)):
        other = torch.randn(size)
        assert run(other.to(device)).shape == Functional(case)(other).shape
