"""jvp of grad and Hessian on torch_xla: what stock gets wrong in silence, ours right to rounding."""

import pytest
import torch
from device import on_xla
from support import worst_error
from torch.func import grad, hessian, jvp
from torch.nn import functional as F

import torch_convfix


def like(values, x):
    return torch.tensor(values, dtype=torch.long, device=x.device)


def labels(x):
    return like([0, 2, -100, 1, 1], x)


def image_labels(x):
    return like([[[0, 1], [2, -100]], [[1, 1], [0, 2]]], x)


def class_weight(x):
    return torch.arange(1, 4, dtype=x.dtype, device=x.device)


LOSSES = {
    "mean": ((5, 3), lambda x: F.cross_entropy(x, labels(x))),
    "sum": ((5, 3), lambda x: F.cross_entropy(x, labels(x), reduction="sum")),
    "none": ((5, 3), lambda x: F.cross_entropy(x, labels(x), reduction="none").sin().sum()),
    "weighted": ((5, 3), lambda x: F.cross_entropy(x, labels(x), class_weight(x))),
    "ignored": ((5, 3), lambda x: F.cross_entropy(x, labels(x).abs() % 3, ignore_index=1)),
    "smoothed": ((5, 3), lambda x: F.cross_entropy(x, labels(x), label_smoothing=0.2)),
    "images": ((2, 3, 2, 2), lambda x: F.cross_entropy(x, image_labels(x))),
    "images weighted": (
        (2, 3, 2, 2),
        lambda x: F.cross_entropy(x, image_labels(x), class_weight(x)),
    ),
    "probabilities": ((5, 3), lambda x: F.cross_entropy(x, x.detach().cos().softmax(1))),
    "nll": ((5, 3), lambda x: F.nll_loss(x.sin(), labels(x), class_weight(x))),
    "unbatched": ((3,), lambda x: F.cross_entropy(x, like(1, x))),
}
POOLS = {
    "adaptive_max_pool1d": ((2, 3, 7), lambda x: F.adaptive_max_pool1d(x, 3).sin().sum()),
    "adaptive_max_pool2d": ((2, 4, 6), lambda x: F.adaptive_max_pool2d(x, (2, 3)).sin().sum()),
    "adaptive_max_pool3d": ((1, 4, 5, 3), lambda x: F.adaptive_max_pool3d(x, 2).sin().sum()),
    "max_pool2d": ((1, 2, 5, 5), lambda x: F.max_pool2d(x, 3, 2, 1).sin().sum()),
}
# With a cotangent that does not depend on the input, so that the tangent is the input's alone.
CONSTANT = {
    f"{name} of a constant": (size, lambda x, f=f: (f(x) * torch.ones_like(f(x)).cumsum(-1)).sum())
    for name, size, f in (
        ("max_pool2d", (1, 2, 5, 5), lambda x: F.max_pool2d(x, 2)),
        ("max_pool3d", (1, 4, 4, 4), lambda x: F.max_pool3d(x, 2)),
        ("adaptive_max_pool1d", (2, 6), lambda x: F.adaptive_max_pool1d(x, 2)),
    )
}
HIDDEN = {
    "cross": ((3, 4), lambda x: torch.cross(x, x * x, dim=0).sin().sum()),
    "inverse": ((3, 3), lambda x: torch.inverse(x).sin().sum()),
    "qr": ((3, 3), lambda x: torch.qr(x)[1].sin().sum()),
    "svd": ((3, 3), lambda x: torch.svd(x)[1].sin().sum()),
    "diag": ((3, 3), lambda x: torch.diag(x).sin().sum()),
    "std": ((4, 3), lambda x: torch.std(x, 1).sin().sum()),
    "kl_div": ((4, 3), lambda x: F.kl_div(x, x.cos(), log_target=True, reduction="sum")),
    "selu": ((4, 3), lambda x: F.selu(x).sin().sum()),
    "multilabel_soft_margin": (
        (4, 3),
        lambda x: F.multilabel_soft_margin_loss(x, (x.detach() > 0).to(x.dtype)),
    ),
}
# torch_xla's gradients of these take tensors of one shape alone; a Hessian leaves some without a batch.
ACTIVATIONS = {
    name: ((4, 3), lambda x, f=f: f(x).sin().sum())
    for name, f in {
        "sigmoid": torch.sigmoid,
        "relu": F.relu,
        "softplus": F.softplus,
        "hardtanh": F.hardtanh,
        "leaky_relu": F.leaky_relu,
        "gelu": F.gelu,
        "hardswish": F.hardswish,
        "hardshrink": F.hardshrink,
        "softshrink": F.softshrink,
        "logsigmoid": F.logsigmoid,
        "elu": F.elu,
        "silu": F.silu,
        "mish": F.mish,
        "tanh": torch.tanh,
        "prelu": lambda x: F.prelu(x, x[0].square()),
    }.items()
}
CASES = LOSSES | POOLS | CONSTANT | HIDDEN | ACTIVATIONS
# Wrong by the whole term, or by the number of targets.
WRONG_IN_STOCK = ("mean", "weighted", "images", "adaptive_max_pool2d", "cross", "qr", "inverse")


def steps(function):
    def run(x, direction):
        product = jvp(grad(function), (x,), (direction,))[1]
        reverse_over_forward = grad(lambda x: jvp(function, (x,), (direction,))[1])(x)
        return [product, reverse_over_forward, hessian(function)(x)]

    return run


def inputs(size):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_against_the_cpu(name):
    size, function = CASES[name]
    run, own = steps(function), inputs(size)
    # gelu's own error function on XLA is right to 1e-8.
    assert worst_error(on_xla(run, *own), run(*own)) < (1e-7 if name == "gelu" else 1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG_IN_STOCK)
def test_stock_is_wrong(name):
    size, function = CASES[name]
    run, own = steps(function), inputs(size)
    with torch_convfix.disabled("xla"):
        stock = on_xla(run, *own)
    assert worst_error(stock[:1], run(*own)[:1]) > 0.5


def test_logdet_is_refused():
    """Its derivative needs a factor that torch_xla's _linalg_slogdet does not return."""
    (a,) = inputs((3, 3))[:1]
    with pytest.raises(RuntimeError, match=r"LU|Incompatible shapes"):
        on_xla(lambda a: [grad(lambda a: torch.logdet(a @ a.mT))(a)], a)


def test_total_weight():
    x = torch.randn(5, 3, dtype=torch.float64)
    for weight in (None, class_weight(x)):

        def run(x, *weight):
            return [
                torch.ops.aten.nll_loss_forward(x, labels(x), *(weight or [None]), reduction, -100)[
                    1
                ]
                for reduction in (1, 2)
            ]

        own = [x] if weight is None else [x, weight]
        assert worst_error(on_xla(run, *own), run(*own)) == 0
