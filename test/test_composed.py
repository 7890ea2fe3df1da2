"""enable(device, convolution="composed"): convolutions of matrix products, on the CPU, against the formula."""

from collections.abc import Iterator

import pytest
import torch
from support import Case, cases, check_many, derivatives, worst_error
from torch.nn import functional as F

import torch_convfix
from torch_convfix import _C


@pytest.fixture
def composed() -> Iterator[None]:
    with torch_convfix.enabled("cpu", convolution="composed"):
        yield


@pytest.fixture
def in_small_blocks(composed) -> None:
    options = [_C.OutputPadding.native, _C.Hardware.other, True]
    _C.enable("cpu", _C.Options(*options, convolutions=_C.Convolutions.composed, block_bytes=2000))


def check_orders(case: Case, order: int, dtype: torch.dtype, most: float) -> None:
    want = derivatives(case.reference, case.inputs(), order)
    assert worst_error(derivatives(case.apply, case.inputs(dtype), order), want) < most


def test_third_order(composed, case_share):
    check_many(lambda case: check_orders(case, 3, torch.float64, 1e-10), cases(), 500 * case_share)


def test_third_order_in_blocks(in_small_blocks, case_share):
    check_many(lambda case: check_orders(case, 3, torch.float64, 1e-10), cases(), 200 * case_share)


def test_float32(composed, case_share):
    check_many(lambda case: check_orders(case, 3, torch.float32, 1e-4), cases(), 200 * case_share)


LAYERS = {
    "dense": Case((2, 4, 7, 7), (6, 4, 3, 3), True, (2, 2), (1, 1)),
    "grouped": Case((2, 4, 7, 7), (6, 2, 3, 3), True, (1, 1), (2, 2), (2, 2), 2),
    "depthwise": Case((2, 4, 7, 7), (4, 1, 3, 3), True, (2, 2), (1, 1), (1, 1), 4),
    "1 x 1": Case((2, 4, 7, 7), (6, 4, 1, 1), True),
    "transposed": Case((2, 4, 5, 5), (4, 3, 3, 3), True, (2, 2), (1, 1), (1, 1), 1, True, (1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_half_precision_is_summed_in_float32(composed, name, dtype):
    """No worse than rounding each result once: of a sum of 2 ** 14 ones too."""
    case = LAYERS[name]
    inputs = [t.to(dtype) for t in case.inputs()]
    want = derivatives(case.reference, [t.double() for t in inputs], 0)
    (got,) = derivatives(case.apply, inputs, 0)
    assert got.dtype == dtype and worst_error([got], want) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision(composed, dtype):
    x, w = torch.ones(64, 2, 18, 18, dtype=dtype), torch.ones(2, 2, 3, 3, dtype=dtype)
    b = torch.zeros(2, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    _, of_w, of_b = torch.autograd.grad(F.conv2d(*leaves).sum(), leaves)
    assert (of_w == 2**14).all() and (of_b == 2**14).all()


@pytest.mark.parametrize("name", LAYERS)
def test_channels_last_stays(composed, name):
    case = LAYERS[name]
    x, w, b = case.inputs()
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    y = case.apply(x, w, b)
    assert y.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    want = derivatives(lambda x: case.reference(x, w, b), [x.detach()], 0)
    assert worst_error([y.detach()], want) < 1e-12
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", LAYERS)
def test_empty_batch(composed, name):
    case = LAYERS[name]
    x, w, b = (t.requires_grad_() for t in case.inputs())
    y = case.apply(x[:0], w, b)
    assert y.shape == case.reference(x, w, b)[:0].shape
    for gradient in torch.autograd.grad(y.square().sum(), [w, b]):
        assert not gradient.any()


@pytest.mark.parametrize("name", LAYERS)
def test_transforms(composed, name):
    """vmap of jvp of grad."""
    case = LAYERS[name]
    x, w, b = case.inputs()
    tangents = torch.randn(3, *w.shape, dtype=torch.float64)

    def hvp(apply, tangent):
        def loss(w):
            return apply(x, w, b).sin().sum()

        return torch.func.jvp(torch.func.grad(loss), (w,), (tangent,))[1]

    got = torch.func.vmap(lambda t: hvp(case.apply, t))(tangents)
    want = torch.stack([hvp(case.reference, t) for t in tangents])
    assert worst_error([got], [want]) < 1e-10


def test_autocast(composed):
    x, w, _ = LAYERS["dense"].inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.conv2d(x, w).dtype == torch.bfloat16


def test_what_does_not_fit_names_the_argument(composed):
    with pytest.raises(RuntimeError, match="input must have 4 channels for groups 1"):
        F.conv2d(torch.rand(1, 3, 5, 5), torch.rand(6, 4, 3, 3))


def test_it_is_registered_and_goes(composed):
    mine = {r.operator for r in torch_convfix.status().registrations if "composed" in r.purpose}
    assert mine == {"convolution", "convolution_backward"}
    assert torch_convfix.status().options["cpu"]["convolution"] == "composed"
    torch_convfix.disable("cpu")
    assert not any("composed" in r.purpose for r in torch_convfix.status().registrations)


OURS = {"aten::convolution", "aten::convolution_backward"}


def called_by(call) -> set[str]:
    """What convolutions call and PyTorch does not compose of others on a new backend."""

    def name(event) -> str:
        return f"{event.name}.{event.overload_name}".removesuffix(".")

    def composite(event) -> bool:
        return event.name.startswith("aten::") and any(
            torch._C._dispatch_has_kernel_for_dispatch_key(name(event), f"Composite{kind}Autograd")
            for kind in ("Implicit", "Explicit")
        )

    def of_ours(event) -> bool:
        parent = event.cpu_parent
        while parent is not None and parent.name not in OURS and composite(parent):
            parent = parent.cpu_parent
        return parent is not None and parent.name in OURS

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        experimental_config=torch.profiler._ExperimentalConfig(capture_overload_names=True),
    ) as record:
        call()
    return {name(e) for e in record.events() if of_ours(e) and not composite(e)}


def test_what_a_backend_needs_is_told(composed):
    def call():
        for case in LAYERS.values():
            leaves = [t.to(torch.bfloat16).requires_grad_() for t in case.inputs()]
            leaves[0].data = leaves[0].to(memory_format=torch.channels_last)
            torch.autograd.grad(case.apply(*leaves).sum(), leaves)

    assert called_by(call) == set(_C.needed_operators())


def test_a_device_with_its_own_refuses():
    with pytest.raises(ValueError, match="convolution must be one of native, composed"):
        torch_convfix.enable("cpu", convolution="im2col")
