"""Normalizations against elementary formulas, by any sequence of forward and reverse mode."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

EPS = 0.5
Net = Callable[..., Tensor]
# The innermost transform first: FR is reverse over forward.
WORDS = ("F", "R", "RR", "RF", "FR", "FF", "RRR", "FRF", "RFR", "FFR", "RRF", "RRRR")


def normalized(x: Tensor, *dims: int) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / (((x - mean) ** 2).mean(dims, keepdim=True) + EPS).sqrt()


def channel(t: Tensor) -> Tensor:
    return t.view(1, 4, 1)


def running(like: Tensor) -> list[Tensor]:
    return [torch.tensor([a, 0.5, 0.75, 1], dtype=like.dtype, device=like.device) for a in (-1, 2)]


def by_running(x: Tensor) -> Tensor:
    mean, variance = map(channel, running(x))
    return (x - mean) / (variance + EPS).sqrt()


def batch_norm(x: Tensor, w: Tensor, b: Tensor, *, training: bool) -> Tensor:
    mean, variance = running(x)
    return F.batch_norm(x, mean, variance, w, b, training, 0.1, EPS)


# The operator, its formula, and the size of weight and bias, for an input of (3, 4, 5).
CASES: dict[str, tuple[Net, Net, int]] = {
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b, EPS),
        lambda x, w, b: normalized(x, -1) * w + b,
        5,
    ),
    "layer_norm without weight": (
        lambda x, w, b: F.layer_norm(x, (4, 5), eps=EPS) * w + b,
        lambda x, w, b: normalized(x, 1, 2) * w + b,
        5,
    ),
    "batch_norm": (
        lambda x, w, b: batch_norm(x, w, b, training=True),
        lambda x, w, b: normalized(x, 0, 2) * channel(w) + channel(b),
        4,
    ),
    "batch_norm without weight": (
        lambda x, w, b: F.batch_norm(x, None, None, None, b, True, 0.1, EPS) * channel(w),
        lambda x, w, b: (normalized(x, 0, 2) + channel(b)) * channel(w),
        4,
    ),
    "batch_norm without running statistics": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True, 0.1, EPS),
        lambda x, w, b: normalized(x, 0, 2) * channel(w) + channel(b),
        4,
    ),
    "batch_norm by running statistics": (
        lambda x, w, b: batch_norm(x, w, b, training=False),
        lambda x, w, b: by_running(x) * channel(w) + channel(b),
        4,
    ),
    "instance_norm": (
        lambda x, w, b: F.instance_norm(x, None, None, w, b, True, 0.1, EPS),
        lambda x, w, b: normalized(x, 2) * channel(w) + channel(b),
        4,
    ),
    "group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b, EPS),
        lambda x, w, b: normalized(x.reshape(3, 2, -1), 2).view(x.shape) * channel(w) + channel(b),
        4,
    ),
}
# PyTorch refuses to update one running statistic by a batch of them.
BATCHED = [n for n in CASES if n != "batch_norm"]


def draw(*like: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(like))
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in like]


def derivative(word: str, function: Net, formula: Net, size: int) -> tuple[Net, list[Tensor]]:
    """The function of tensors that takes the derivatives of `word`, and tensors to call it with."""
    values = draw(*(torch.empty(s, dtype=torch.float64) for s in ((3, 4, 5), size, size)))
    outputs = [formula(*values)]
    for letter in word:
        function = {"F": forward, "R": reverse}[letter](function, len(values))
        new = draw(*(values if letter == "F" else outputs))
        outputs = outputs if letter == "F" else list(values)
        values = [*values, *new]
    return function, values


def reverse(function: Net, count: int) -> Net:
    def gradient(*given: Tensor) -> tuple[Tensor, ...]:
        outputs, pullback = vjp(function, *given[:count])
        return pullback(given[count] if isinstance(outputs, Tensor) else given[count:])

    return gradient


def forward(function: Net, count: int) -> Net:
    return lambda *given: jvp(function, given[:count], given[count:])[1]


def results(word: str, function: Net, name: str, device: torch.device | str) -> list[Tensor]:
    """The derivatives of `word`, on a device."""
    _, formula, size = CASES[name]
    run, values = derivative(word, function, formula, size)
    taken = run(*(t.to(device) for t in values))
    return [taken] if isinstance(taken, Tensor) else list(taken)


def outside_of_vmap(f, name, device="cpu"):
    """The gradient of the squared gradients of each sample: what MAML by torch.func takes."""
    size = CASES[name][2]
    generator = torch.Generator().manual_seed(0)
    x, w, b = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(device)
        for s in ((2, 3, 4, 5), size, size)
    )

    def squared(x, w, b):
        gradients = grad(lambda *t: f(*t).sin().sum(), argnums=(0, 1, 2))(x, w, b)
        return sum(g.square().sum() for g in gradients)

    return grad(lambda *t: vmap(squared, (0, None, None))(*t).sum(), argnums=(0, 1, 2))(x, w, b)
