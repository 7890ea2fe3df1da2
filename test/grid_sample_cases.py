"""`grid_sample`: its kinds, inputs, and a formula written out as a sum over every pixel."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = [
    (dim, mode, padding, align)
    for dim in (2, 3)
    for mode in ("bilinear", "bicubic", "nearest")
    if (dim, mode) != (3, "bicubic")
    for padding in ("zeros", "border", "reflection")
    for align in (False, True)
]


def _bump(distance: Tensor, mode: str) -> Tensor:
    """The weight of a pixel by its distance: a hat, or the cubic convolution with a = -3/4."""
    d = distance.abs()
    if mode == "bilinear":
        return (1 - d).clamp(min=0)
    if mode == "nearest":
        return (d < 0.5).to(d.dtype)
    a = -0.75
    inner = (a + 2) * d**3 - (a + 3) * d**2 + 1
    outer = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return torch.where(d <= 1, inner, torch.where(d < 2, outer, torch.zeros_like(d)))


def _folded(position: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    if padding_mode == "reflection":
        low, span = (0, size - 1) if align_corners else (-0.5, size)
        position = low + span - ((position - low) % (2 * span) - span).abs()
    return position.clamp(0, size - 1)


def grid_sample(
    input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool
) -> Tensor:
    """As `torch.nn.functional.grid_sample`, away from kinks and for coordinates from -2 to 2."""
    spatial = input.shape[2:]
    letters = "xyz"[: len(spatial)]
    weights = []
    for i, size in enumerate(spatial):
        coordinate = grid.flatten(1, -2)[..., len(spatial) - 1 - i]
        position = (coordinate + 1) * (size - align_corners) / 2 - 0.5 * (not align_corners)
        if padding_mode != "zeros" and mode != "bicubic":
            position = _folded(position, size, padding_mode, align_corners)
        pixels = torch.arange(-2 * size, 3 * size, dtype=grid.dtype, device=grid.device)
        # Row e: which pixel of the image stands at e.
        at = (
            pixels
            if padding_mode == "zeros"
            else _folded(pixels, size, padding_mode, align_corners)
        )
        stands = (at[:, None] == torch.arange(size, device=grid.device)).to(grid.dtype)
        weights.append(_bump(position[..., None] - pixels, mode) @ stands)
    terms = ", ".join(f"no{a}" for a in letters).replace(", ", ",")
    sampled = torch.einsum(f"nc{letters},{terms}->nco", input, *weights)
    return sampled.reshape(*input.shape[:2], *grid.shape[1:-1])


def sample(mode: str, padding: str, align: bool):
    return functools.partial(F.grid_sample, mode=mode, padding_mode=padding, align_corners=align)


def formula(mode: str, padding: str, align: bool):
    return functools.partial(grid_sample, mode=mode, padding_mode=padding, align_corners=align)


def tensors(dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """An image and a grid that reaches over its edges."""
    generator = torch.Generator().manual_seed(dim)
    image = torch.randn(2, 2, *(4, 5, 3)[:dim], generator=generator, dtype=torch.float64)
    grid = torch.rand(2, *(2, 3, 2)[:dim], dim, generator=generator, dtype=torch.float64)
    return image.to(dtype), (grid * 3 - 1.5).to(dtype)
