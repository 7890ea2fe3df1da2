"""What is fed by a tensor written in place, a view of one, an out= result or .data = is right on XLA."""

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from device import on_xla
from support import Case, orders, worst_error
from torch import Tensor
from torch.nn import functional as F

import torch_convfix

Fed = tuple[Tensor, Tensor]  # a leaf, and the tensor that an operator gets


def in_place_activation(x: Tensor) -> Fed:
    leaf = x.detach().requires_grad_()
    return leaf, F.leaky_relu(leaf * 0.9, 0.3, inplace=True)


def written_slice(x: Tensor) -> Fed:
    leaf = x.detach().requires_grad_()
    written = leaf * 1.1
    written[..., 0] = written[..., -1] * 2
    return leaf, written


def view_of_a_written_base(x: Tensor) -> Fed:
    leaf = x.detach().requires_grad_()
    base = torch.stack([leaf, leaf * 2])
    view = base[1]
    base.mul_(0.6)
    return leaf, view


def out_result(x: Tensor) -> Fed:
    leaf = torch.empty(0, dtype=x.dtype, device=x.device)
    torch.mul(x, 1.2, out=leaf.resize_(x.shape))
    leaf.requires_grad_()
    return leaf, leaf


def set_data(x: Tensor) -> Fed:
    leaf = torch.zeros(1, dtype=x.dtype, device=x.device).requires_grad_()
    leaf.data = x * 1.3
    return leaf, leaf


FEEDS = [in_place_activation, written_slice, view_of_a_written_base, out_result, set_data]


def check(
    op: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    order: int,
    tolerance: float = 1e-10,
) -> None:
    def run(op: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
        results = []
        for feed in FEEDS:
            leaves, fed = zip(*map(feed, inputs), strict=True)
            results += orders(op(*fed), leaves, order)
        return results

    got, want = on_xla(functools.partial(run, op), *inputs), run(reference, *inputs)
    each = len(want) // len(FEEDS)
    errors = {
        feed.__name__: worst_error(got[i * each :][:each], want[i * each :][:each])
        for i, feed in enumerate(FEEDS)
    }
    assert max(errors.values()) < tolerance, errors


def by_running_statistics(x: Tensor) -> Tensor:
    return F.batch_norm(x, x.new_full((3,), 0.2), x.new_full((3,), 1.5))


def regular(x: Tensor) -> Tensor:
    return x * 0.2 + torch.arange(1, 4, dtype=x.dtype, device=x.device).diag()


LACKING = "PyTorch has no"
LABELS = torch.tensor([1, 0])
# A fix by the operator that it is registered for: sizes of the inputs, and a call of them.
OPERATORS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "max_pool2d": ([(2, 2, 5, 4)], lambda x: F.max_pool2d(x, 2)),
    "max_pool3d": ([(1, 2, 4, 4, 4)], lambda x: F.max_pool3d(x, 2)),
    "max_pool2d_with_indices_backward": ([(2, 5, 4)], lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max_pool3d_with_indices_backward": ([(2, 4, 4, 3)], lambda x: F.max_pool3d(x, 3, 2, 1)),
    "elu_backward": ([(2, 3)], lambda x: F.elu(x, 0.7)),
    "selu": ([(2, 3)], F.selu),
    "selu_": ([(2, 3)], lambda x: torch.selu_(x * 1)),
    "diag": ([(3, 3)], torch.diag),
    "kl_div": ([(2, 3), (2, 3)], lambda x, y: F.kl_div(x, y, log_target=True)),
    "std": ([(5,)], torch.std),
    "std.dim": ([(2, 5)], lambda x: torch.std(x, 1, unbiased=False)),
    "einsum": ([(2, 3), (3, 2)], lambda x, y: torch.einsum("ik,kj->ij", x, y)),
    "cross": ([(3, 4), (3, 4)], lambda x, y: torch.cross(x, y, dim=0)),
    "inverse": ([(3, 3)], lambda x: torch.inverse(regular(x))),
    "qr": ([(3, 3)], lambda x: torch.qr(x)[1]),
    "svd": ([(3, 3)], lambda x: torch.svd(regular(x))[1]),
    "adaptive_max_pool2d_backward": ([(2, 5, 7)], lambda x: F.adaptive_max_pool2d(x, (2, 3))),
    "amax": ([(2, 3)], torch.amax),
    "amin": ([(2, 3)], lambda x: torch.amin(x, 1)),
    "norm.ScalarOpt_dim": ([(2, 3)], lambda x: torch.norm(x, -math.inf, 1)),
    "_pad_circular": ([(1, 2, 3, 4)], lambda x: F.pad(x, (1, 2, 2, -1), "circular")),
    "roll": ([(2, 3)], lambda x: torch.roll(x, 1, 0)),
    "nll_loss_nd": ([(2, 3)], lambda x: F.nll_loss(x, LABELS.to(x.device))),
    "native_layer_norm_backward": ([(2, 3), (3,)], lambda x, w: F.layer_norm(x, (3,), w)),
    "native_group_norm_backward": ([(2, 4, 3), (4,)], lambda x, w: F.group_norm(x, 2, w)),
    "native_batch_norm": ([(4, 3), (3,)], lambda x, w: F.batch_norm(x, None, None, w, None, True)),
    "native_batch_norm_backward": ([(2, 3, 2)], by_running_statistics),
    "avg_pool2d": ([(1, 2, 5, 5)], lambda x: F.avg_pool2d(x, 2, None, 1, True, True, 3)),
    "avg_pool3d": ([(1, 1, 5, 5, 4)], lambda x: F.avg_pool3d(x, 2, None, 1, True, True, 3)),
}


def test_every_mended_operator_is_here():
    registered = {
        r.operator
        for r in torch_convfix.status().registrations
        if r.device == "xla" and r.dispatch_key == "AutogradXLA"
        if not r.purpose.startswith(
            LACKING
        )  # those have no reference on the CPU, and tests of their own
    }
    # logdet: torch_xla cannot differentiate it, in any way.
    assert registered - {"_convolution_double_backward", "logdet"} == OPERATORS.keys()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str):
    sizes, op = OPERATORS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
    check(op, op, inputs, 2, 1e-5 if name == "svd" else 1e-10)  # XLA's SVD is right to 1e-7


def spread(value: int, dim: int) -> tuple[int, ...]:
    return (value,) * dim


def geometry(dim: int, kind: str, transposed: bool) -> Case:
    groups, per_group = {"plain": (1, 2), "grouped": (2, 2), "depthwise": (2, 1)}.get(kind, (1, 2))
    channels = groups * per_group
    output_padding = {"output padding": 1, "trailing zeros": 2}.get(kind, 0)
    return Case(
        (2, channels, *spread(4, dim)),
        (channels, per_group, *spread(2, dim)),
        bias=True,
        stride=spread(1 if kind == "trailing zeros" else 2, dim),
        padding=spread(1, dim),
        dilation=spread(3 if kind == "trailing zeros" else 1, dim),
        groups=groups,
        transposed=transposed,
        output_padding=spread(output_padding, dim),
    )


KINDS = {
    False: ["plain", "grouped", "depthwise"],
    True: ["plain", "grouped", "depthwise", "output padding", "trailing zeros"],
}


@pytest.mark.parametrize(
    ("transposed", "kind"), [(t, kind) for t, kinds in KINDS.items() for kind in kinds]
)
@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_convolutions(dim: int, transposed: bool, kind: str):
    case = geometry(dim, kind, transposed)
    check(case.apply, case.reference, case.inputs(), 3)


def test_a_net_with_an_activation_in_place_before_its_pool():
    """The smallest net that torchvision's have in them, with an R1 penalty."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(inplace=True), torch.nn.MaxPool2d(2)
    ).double()
    parameters = dict(net.named_parameters())

    def penalty(x: Tensor, *values: Tensor) -> Sequence[Tensor]:
        own = [v.detach().requires_grad_() for v in values]
        x = x.detach().requires_grad_()
        y = torch.func.functional_call(net, dict(zip(parameters, own, strict=True)), (x,))
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), own)

    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = [x, *parameters.values()]
    assert worst_error(on_xla(penalty, *inputs), penalty(*inputs)) < 1e-10
