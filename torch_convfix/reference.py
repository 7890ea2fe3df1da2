"""A Winograd convolution in plain PyTorch: the leaky reference of the masked convolutions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F

_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # and infinity


def winograd_conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    tile: Literal[2, 4, 6] = 2,
    padding: int | tuple[int, int] = 0,
) -> torch.Tensor:
    """A convolution of stride 1 as F(tile x tile, kernel) of Lavin and Gray (2016).

    Every tile of outputs is made of sums and differences of its (tile + kernel - 1)^2 inputs, whose
    parts that an output must not see cancel only up to rounding. So it LEAKS: an input under a tap
    that was set to zero, or (tile 4 and 6) beyond the kernel, reaches an output of the same tile
    with the size of the rounding, and a NaN reaches it whole. Use it to measure that.

    Args:
        x: (batch, in, height, width), any floating dtype.
        w: (out, in, *kernel), every kernel size at most 9 - tile.
        padding: zeros on every side, or (above and below, left and right).

    Returns:
        (batch, out, *(size + 2 padding - kernel + 1)), differentiable to any order.
    """
    if tile not in (2, 4, 6):
        raise ValueError(f"tile: got {tile}; use 2, 4 or 6")
    if w.dim() != 4 or max(w.shape[2:]) > 9 - tile:
        raise ValueError(
            f"w: got shape {tuple(w.shape)}; it must be (out, in, height, width) with a kernel of "
            f"at most {9 - tile} each way for tile={tile}"
        )
    pads = (padding, padding) if isinstance(padding, int) else padding
    kernel = w.shape[2:]
    if x.dim() != 4 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x: got shape {tuple(x.shape)}; it must be (batch, {w.shape[1]}, *size)")
    out = [s + 2 * p - k + 1 for s, p, k in zip(x.shape[2:], pads, kernel, strict=True)]
    if min(out) < 1:
        raise ValueError(f"x: got shape {tuple(x.shape)}; smaller than the kernel {tuple(kernel)}")
    (a0, g0, b0), (a1, g1, b1) = ([m.to(x) for m in _transforms(tile, k)] for k in kernel)
    more = [-o % tile for o in out]
    x = F.pad(x, [pads[1], pads[1] + more[1], pads[0], pads[0] + more[0]])
    for dim, k in zip((2, 3), kernel, strict=True):
        x = x.unfold(dim, tile + k - 1, tile)
    inputs = (b0.T @ x @ b1).permute(4, 5, 1, 0, 2, 3)  # (i, j, in, batch, rows, columns)
    kernels = (g0 @ w @ g1.T).permute(2, 3, 0, 1)  # (i, j, out, in)
    products = (kernels @ inputs.flatten(3)).unflatten(3, inputs.shape[3:])
    y = a0.T @ products.permute(3, 2, 4, 5, 0, 1) @ a1  # (batch, out, rows, columns, tile, tile)
    y = y.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return y[:, :, : out[0], : out[1]]


@functools.cache
def _transforms(tile: int, kernel: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, G and B of `A^T [(G w) * (B^T x)]`: Toom-Cook interpolation, transposed."""
    n = tile + kernel - 1
    points = _POINTS[: n - 1]

    def values(terms: int) -> torch.Tensor:
        finite = [[p**i for i in range(terms)] for p in points]
        return torch.tensor([*finite, [0.0] * (terms - 1) + [1.0]], dtype=torch.float64)

    def polynomial(roots: Iterable[float]) -> torch.Tensor:
        coefficients = [1.0]
        for r in roots:
            pairs = zip([0.0, *coefficients], [*coefficients, 0.0], strict=True)
            coefficients = [low - r * same for low, same in pairs]
        return torch.tensor(coefficients, dtype=torch.float64)

    interpolation = torch.zeros(n, n, dtype=torch.float64)
    for i, p in enumerate(points):
        others = [q for q in points if q != p]
        interpolation[:-1, i] = polynomial(others) / math.prod(p - q for q in others)
    interpolation[:, -1] = polynomial(points)
    return values(tile), values(kernel), interpolation
