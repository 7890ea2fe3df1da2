"""Operators of conv nets on a batch whose size only the device knows: run in a process of its own.

    XLA_EXPERIMENTAL=nonzero python bounded_batch.py RESULTS [NAME ...]

Writes, for every name, the results on the device and on the CPU, or the error's first line. Results
are reduced over the batch, so that none has a bounded-dynamic size: torch_xla cannot read one back
after a sync on XLA:CPU.
"""

import functools
import sys
from collections.abc import Callable

import torch
import torch_xla
from torch import Tensor, nn
from torch.nn import functional as F

import torch_convfix  # noqa: F401

Function = Callable[[Tensor, dict[str, Tensor]], Tensor]

DEVICE = torch_xla.device()
CHOSEN = torch.tensor([1, 0, 1, 1, 0, 1])


def parameters(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "w": (8, 3, 3, 3),
        "b": (8,),
        "grouped": (8, 2, 3, 3),
        "depthwise": (6, 1, 3, 3),
        "transposed": (3, 8, 3, 3),
        "transposed_grouped": (4, 3, 3, 3),
        "linear": (5, 192),
        "c": (5,),
        "s": (3,),
        "t": (3,),
    }
    return {k: torch.randn(s, generator=generator).to(dtype) * 0.3 for k, s in sizes.items()}


def images(dtype: torch.dtype) -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


LABELS = torch.tensor([0, 1, 2, 1, 0, 2])


def four(x: Tensor) -> Tensor:
    return (
        torch.cat([x, x[:, :1]], 1)
        if x.device.type == "cpu"
        else torch.cat([x, x.narrow(1, 0, 1)], 1)
    )


CONVOLUTIONS: dict[str, Function] = {
    "conv1d": lambda x, p: F.conv1d(x.flatten(2), p["w"].flatten(2), p["b"], padding=1),
    "conv2d": lambda x, p: F.conv2d(x, p["w"], p["b"], stride=2, padding=1),
    "conv3d": lambda x, p: F.conv3d(x.unsqueeze(2), p["w"].unsqueeze(2), p["b"]),
    "grouped": lambda x, p: F.conv2d(four(x), p["grouped"], p["b"], groups=2, stride=2),
    "depthwise": lambda x, p: F.conv2d(x, p["depthwise"], groups=3),
    "conv_transpose2d, grouped": lambda x, p: F.conv_transpose2d(
        four(x), p["transposed_grouped"], stride=2, padding=1, output_padding=1, groups=2
    ),
}

# Several a case: what takes time is to compile, for every size that somebody asks for.
OPERATORS: dict[str, Function] = {
    "elu, adaptive_avg_pool2d, prelu": lambda x, p: F.prelu(
        F.adaptive_avg_pool2d(F.elu(x), 2), p["s"]
    ),
    "group_norm, layer_norm": lambda x, p: F.layer_norm(
        F.group_norm(x, 3, p["s"], p["t"]).square(), [3, 8, 8]
    ),
    "interpolate": lambda x, p: F.interpolate(
        F.interpolate(x, scale_factor=1.5, mode="nearest"), size=(24, 5), mode="nearest"
    ),
    "view, matmul, log_softmax": lambda x, p: F.log_softmax(x.view(-1, 192) @ p["linear"].t(), 1),
    "mean, var": lambda x, p: x.mean() + x.var() + x.std((0, 2)).mean(),
    "abs, where, chunk, narrow": lambda x, p: torch.mul(
        *torch.cat([(x - x * x).abs(), torch.where(x > 0, x, x * 2)], 1).narrow(2, 1, 4).chunk(2, 1)
    ),
    "cross_entropy": lambda x, p: F.cross_entropy(x.mean((2, 3)), p["labels"]),
    "mse_loss, l1_loss, binary_cross_entropy": lambda x, p: (
        F.mse_loss(x, torch.ones_like(x))
        + F.l1_loss(x, torch.zeros_like(x))
        + F.binary_cross_entropy_with_logits(x, torch.ones_like(x))
    ),
    "zeros_like, new_zeros": lambda x, p: x + torch.zeros_like(x) + x.new_zeros(x.shape),
}


def reduced(t: Tensor) -> list[Tensor]:
    """Two sums over the batch that a change of any element changes; itself where it has no batch."""
    dynamic = t.dim() and (not isinstance(t.shape[0], int) or t.shape[0] == CHOSEN.sum())
    return [t.sum(0), (t**3).sum(0)] if dynamic else [t]


def select(device: torch.device, t: Tensor) -> Tensor:
    return t.to(device)[torch.nonzero(CHOSEN.to(device)).squeeze(1)]


def two_orders(
    function: Function, order: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """The value, the gradients, and those of the sum of the gradients' squares."""
    x = select(device, images(dtype)).detach().requires_grad_()
    p = {k: v.to(device).requires_grad_() for k, v in parameters(dtype).items()}
    inputs = [x, *p.values()]
    p["labels"] = select(device, LABELS)
    last = [function(x, p)]
    results = list(last)
    last = [torch.tanh(last[0])]
    for i in range(order):
        scalar = sum(t.square().sum() for t in last)
        gradients = torch.autograd.grad(
            scalar, inputs, create_graph=i + 1 < order, allow_unused=True
        )
        last = [g for g in gradients if g is not None]
        results += last
        last = [g for g in last if g.requires_grad]
    return [s for t in results for s in reduced(t.detach())]


def penalty_step(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """A critic's WGAN-GP step: the loss and every gradient."""
    torch.manual_seed(0)
    critic = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),
        nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 1),
    )
    critic = critic.to(dtype).to(device)
    x = select(device, images(dtype)).detach().requires_grad_()
    score = critic(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss = score.mean() + 10 * ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()
    gradients = torch.autograd.grad(loss, list(critic.parameters()))
    buffers = [b for b in critic.buffers() if b.is_floating_point()]
    return [t.detach() for t in [loss, *gradients, *buffers]]


def images_of_unknown_height(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    rows = torch.nonzero(torch.tensor([1, 1, 0, 1, 1, 1, 0, 1]).to(device)).squeeze(1)
    x = images(dtype).to(device).index_select(2, rows)
    w = parameters(dtype)["w"].to(device)
    parameter = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return [torch.ops.aten.convolution_overrideable(x, w, None, *parameter).sum(2)]


def groups_in_float64(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    x = select(device, images(dtype).repeat(1, 2, 1, 1).narrow(1, 0, 4))
    w = parameters(dtype)["grouped"].to(device)
    convolution = torch.ops.aten.convolution_overrideable
    return [torch.tanh(convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2)).sum(0)]


def sync_midway(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    x = select(device, images(dtype))
    torch_xla.sync()
    return [x.sum(0)]


def divide_by_size(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    x = select(device, images(dtype))
    return [x.sum() / x.shape[0]]


def weight_gradient_of_groups(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    x, w = select(device, images(dtype)), parameters(dtype)["depthwise"].to(device)
    g = select(device, torch.ones(6, 6, 6, 6, dtype=dtype))
    parameter = ([1, 1], [0, 0], [1, 1], False, [0, 0], 3)
    return [
        torch.ops.aten.convolution_backward_overrideable(g, x, w, *parameter, [False, True, False])[
            1
        ]
        if device.type == "xla"
        else torch.ops.aten.convolution_backward(g, x, w, None, *parameter, [False, True, False])[1]
    ]


def mean_squared_error(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    x = select(device, images(dtype))
    return [F.mse_loss(x, torch.ones_like(x))]


def zeros(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.zeros_like(select(device, images(dtype))) + 1).sum()]


Step = Callable[[torch.device, torch.dtype], list[Tensor]]


def _order(function: Function, order: int) -> Step:
    return functools.partial(two_orders, function, order)


STEPS: dict[str, Step] = {
    **{name: _order(function, 2) for name, function in (CONVOLUTIONS | OPERATORS).items()},
    "penalty step, grouped": penalty_step,
}
# Name -> the step, and what the error says (as a pattern), with and without ours.
LIMITS: dict[str, tuple[Step, str]] = {
    "a sync midway": (sync_midway, "PadToStatic is not implemented"),
    "an unknown height": (images_of_unknown_height, "Dynamic Spatial Convolution is not supported"),
    "instance_norm": (
        _order(lambda x, p: F.instance_norm(x), 0),
        "expected int but got <=18|expected to contain only concrete integers",
    ),
    "pixel_shuffle's gradient": (
        _order(lambda x, p: F.pixel_shuffle(four(x), 2), 1),
        "expected to contain only concrete integers|cannot access PyObject",
    ),
    "bilinear": (
        _order(lambda x, p: F.interpolate(x, scale_factor=2, mode="bilinear"), 0),
        "Cannot call sizes_custom",
    ),
    "slicing with [:, :, 1:5]": (
        _order(lambda x, p: x[:, :, 1:5], 0),
        "le has not been implemented",
    ),
    "groups in float64": (
        groups_in_float64,
        "Dynamic input unexpectedly found for unsupported instruction",
    ),
    "rand_like": (
        _order(lambda x, p: torch.rand_like(x), 0),
        "Dynamic input unexpectedly found for unsupported instruction",
    ),
}
# Name -> a step that stock computes wrong, without a word.
WRONG: dict[str, Step] = {
    "W of groups": weight_gradient_of_groups,
    "mse_loss": mean_squared_error,
    "zeros_like": zeros,
}
ALL: dict[str, Step] = STEPS | {k: step for k, (step, _) in LIMITS.items()} | WRONG
ALL["dividing by the size"] = divide_by_size


def dtype_of(name: str) -> torch.dtype:
    """float32 for groups: what XLA:CPU makes of them in float64 cannot be dynamic."""
    grouped = any(word in name for word in ("grouped", "depthwise", "W of groups"))
    return torch.float32 if grouped else torch.float64


def main(path: str, *names: str) -> None:
    results: dict[str, tuple[list[Tensor], list[Tensor]] | str] = {}
    for name in names or ALL:
        want = [] if name in LIMITS else ALL[name](torch.device("cpu"), torch.float64)
        try:
            got = ALL[name](DEVICE, dtype_of(name))
            torch_xla.sync()
            results[name] = ([t.cpu() for t in got], want)
        except (RuntimeError, ValueError) as error:
            results[name] = str(error)
        torch.save(results, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
