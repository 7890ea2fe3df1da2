"""A Winograd convolution in plain PyTorch: the leaky reference of the masked convolutions."""

from __future__ import annotations

import functools
from typing import Literal

import torch
import torch.nn.functional as F

_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # and infinity


def winograd_conv2d(
    x: torch.Tensor, w: torch.Tensor, tile: Literal[2, 4, 6] = 2, padding: int = 0
) -> torch.Tensor:
    """The 3x3 convolution of stride 1 as F(tile x tile, 3 x 3) of Lavin and Gray (2016).

    Every tile of outputs is made of sums and differences of (tile + 2)^2 inputs, whose parts that
    an output must not see cancel only up to rounding. So it LEAKS: an input outside the kernel, or
    under a masked tap, reaches an output of the same tile with the size of the rounding, and a NaN
    reaches it whole. Use it to measure that, not to compute.

    Args:
        x: (batch, in, height, width), any floating dtype.
        w: (out, in, 3, 3).
        padding: zeros on every side.

    Returns:
        (batch, out, height + 2 padding - 2, width + 2 padding - 2), differentiable to any order.
    """
    if tile not in (2, 4, 6):
        raise ValueError(f"tile: got {tile}; use 2, 4 or 6")
    if w.dim() != 4 or w.shape[2:] != (3, 3):
        raise ValueError(f"w: got shape {tuple(w.shape)}; it must be (out, in, 3, 3)")
    if x.dim() != 4 or x.shape[1] != w.shape[1] or min(x.shape[2:]) + 2 * padding < 3:
        raise ValueError(
            f"x: got shape {tuple(x.shape)}; it must be (batch, {w.shape[1]}, height, width) with "
            f"at least 3 pixels each way after padding={padding}"
        )
    a, g, b = (m.to(x) for m in _transforms(tile))
    out = [s + 2 * padding - 2 for s in x.shape[2:]]
    rows, columns = (-(-o // tile) for o in out)
    extra = [rows * tile - out[0], columns * tile - out[1]]
    x = F.pad(x, [padding, padding + extra[1], padding, padding + extra[0]])
    tiles = x.unfold(2, tile + 2, tile).unfold(3, tile + 2, tile)
    inputs = (b.T @ tiles @ b).permute(4, 5, 1, 0, 2, 3)  # (i, j, in, batch, rows, columns)
    kernels = (g @ w @ g.T).permute(2, 3, 0, 1)  # (i, j, out, in)
    products = (kernels @ inputs.flatten(3)).unflatten(3, inputs.shape[3:])
    y = a.T @ products.permute(3, 2, 4, 5, 0, 1) @ a  # (batch, out, rows, columns, tile, tile)
    y = y.transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return y[:, :, : out[0], : out[1]]


@functools.cache
def _transforms(tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, G and B of `A^T [(G w) * (B^T x)]`: Toom-Cook interpolation, transposed."""
    n = tile + 2
    points = torch.tensor(_POINTS[: n - 1], dtype=torch.float64)

    def values(terms: int) -> torch.Tensor:
        infinity = torch.zeros(1, terms, dtype=torch.float64)
        infinity[0, -1] = 1
        return torch.cat([points[:, None] ** torch.arange(terms), infinity])

    return values(tile), values(3), torch.linalg.inv(values(n))
