"""Ready masks, as bool tensors of the shape of a weight (or broadcastable to it)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch

Kind = Literal["A", "B"]


def causal_mask(
    kernel_size: int | Sequence[int],
    kind: Kind = "B",
    channels: tuple[int, int] | None = None,
    colours: int = 3,
) -> torch.Tensor:
    """The raster-order mask of PixelCNN (van den Oord et al., 2016, arXiv:1601.06759).

    Keeps the taps before the centre in row-major order; kind "B" keeps the centre too. The centre
    is tap (k - 1) // 2, so that padding="same" puts it on the output's own pixel.

    Args:
        kernel_size: an int means two dimensions; a sequence gives one size a dimension.
        channels: (out_channels, in_channels / groups). Then both are cut into `colours` equal,
            contiguous groups in order, and at the centre an output colour sees the earlier
            colours only (kind "B": its own too).

    Returns:
        (1, 1, *kernel_size), or (*channels, *kernel_size) with `channels`.
    """
    if kind not in ("A", "B"):
        raise ValueError(f'kind: got {kind!r}; use "A" (centre masked) or "B" (centre kept)')
    size = (kernel_size,) * 2 if isinstance(kernel_size, int) else tuple(kernel_size)
    centre = tuple((k - 1) // 2 for k in size)
    taps = itertools.product(*map(range, size))
    kept = [tap < centre for tap in taps]
    centre_tap = sum(kept)
    kept[centre_tap] = kind == "B"
    mask = torch.tensor(kept).view(1, 1, *size)
    if channels is None:
        return mask
    if any(c % colours for c in channels):
        raise ValueError(f"channels: got {channels}; both must be multiples of colours={colours}")
    out_colour, in_colour = (torch.arange(c) // (c // colours) for c in channels)
    mask = mask.repeat(*channels, *[1] * len(size))
    sees = out_colour[:, None] >= in_colour if kind == "B" else out_colour[:, None] > in_colour
    mask.flatten(2)[:, :, centre_tap] = sees
    return mask


def causal_mask_1d(kernel_size: int, kind: Kind = "B") -> torch.Tensor:
    """`causal_mask` along time, for stacks like WaveNet (van den Oord et al., 2016).

    With padding="same", output t sees inputs up to t (kind "A": before t), (kernel_size + 1) // 2
    of them, `dilation` apart. Returns (1, 1, kernel_size).
    """
    return causal_mask((kernel_size,), kind)


def checkerboard_mask(kernel_size: int | Sequence[int]) -> torch.Tensor:
    """The context mask of two-pass image coding (He et al., 2021, arXiv:2103.15306).

    Keeps the taps at an odd city-block distance from the centre, so that the pixels of one colour
    of a checkerboard see those of the other only. Returns (1, 1, *kernel_size).
    """
    size = (kernel_size,) * 2 if isinstance(kernel_size, int) else tuple(kernel_size)
    parity = sum((k - 1) // 2 for k in size)
    taps = itertools.product(*map(range, size))
    return torch.tensor([(sum(tap) - parity) % 2 == 1 for tap in taps]).view(1, 1, *size)
