"""A NaN or Inf reaches what it reaches on the CPU.

The CPU's own kernels differ on one thing: whether a zero of the padding is multiplied (0 x NaN is
NaN). So what is reached must lie between the formula without padding and that with it.
"""

import pytest
import torch
from device import on_xla
from reference import conv
from torch.nn import functional as F

SIZE, CHANNELS = 9, 8
NAN, INF = float("nan"), float("inf")
PLACES = [
    ("x", 0, NAN),
    ("x", 40, INF),
    ("w", 0, NAN),
    ("w", 4, INF),
    ("w", 7, NAN),
    ("g", 0, INF),
    ("g", 12, NAN),
]


def all_three(convolve, x, w, g):
    """F(x, w), I(g, w) and W(x, g)."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = convolve(x, w)
    return [y.detach(), *torch.autograd.grad(y, [x, w], g)]


def reached(x, w, g, stride, groups):
    """What the special value must reach, and what it may reach, in each of the three."""

    def formula(x, w):
        return conv(x, w, None, [stride] * 2, [1, 1], [1, 1], groups, False, [0, 0])

    def special(t):
        return (~t.isfinite()).to(t.dtype)

    ones = [torch.ones_like(t) for t in (x, w, g)]
    hits = [0.0, 0.0, 0.0]
    for i, t in enumerate((x, w, g)):  # one product of the form is one hit
        counted = all_three(formula, *[special(t) if i == j else one for j, one in enumerate(ones)])
        counted[(1, 2, 0)[i]] *= 0  # each of the three lacks one of x, w, g
        hits = [h + c for h, c in zip(hits, counted, strict=True)]
    must = [h > 0 for h in hits]

    padded = all_three(formula, x, w, g)  # the formula pads x: F and W
    margin = 3
    wide = [F.pad(x, [margin * stride, (margin + 3) * stride] * 2), F.pad(g, [margin] * 4)]
    inner = slice(margin * stride, margin * stride + SIZE)
    upsampled = all_three(  # and here g: I
        lambda x, w: formula(x, w)[..., : wide[1].shape[2], : wide[1].shape[3]], wide[0], w, wide[1]
    )[1][..., inner, inner]
    may = [~t.isfinite() for t in (padded[0], upsampled, padded[2])]
    return must, may


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 4, CHANNELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reaches_what_the_formula_says(dtype, groups, stride):
    out = (SIZE - 1) // stride + 1
    trials = []
    for place, position, value in PLACES:
        t = {
            "x": torch.ones(2, CHANNELS, SIZE, SIZE, dtype=dtype),
            "w": torch.ones(CHANNELS, CHANNELS // groups, 3, 3, dtype=dtype),
            "g": torch.ones(2, CHANNELS, out, out, dtype=dtype),
        }
        t[place].view(-1)[position] = value
        trials.append(list(t.values()))

    def run(*flat):
        def convolve(x, w):
            return F.conv2d(x, w, stride=stride, padding=1, groups=groups)

        return [r for i in range(0, len(flat), 3) for r in all_three(convolve, *flat[i : i + 3])]

    flat = [t for trial in trials for t in trial]
    bounds = [reached(*trial, stride, groups) for trial in trials]
    must = [m for b in bounds for m in b[0]]
    may = [m for b in bounds for m in b[1]]
    assert sum(m.sum().item() for m in must) > 0
    for results in (run(*flat), on_xla(run, *flat)):  # the CPU itself first
        for result, low, high in zip(results, must, may, strict=True):
            assert not (low & result.isfinite()).any()
            assert not (~high & ~result.isfinite()).any()
