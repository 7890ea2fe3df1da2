"""A convolution written out in slices and contractions: the independent formula that tests hold
every convolution against. It shares nothing with any convolution kernel, and differentiates to any
order by ordinary autograd (PyTorch's own CPU convolution does not: the third derivative of a
transposed convolution with output padding raises there)."""

import itertools
from typing import Any

import torch
from torch import Tensor


def _plain(x: Tensor, w: Tensor, stride, padding, dilation, groups: int) -> Tensor:
    dim = w.dim() - 2
    pads = [p for size in reversed(padding) for p in (size, size)]
    x = torch.nn.functional.pad(x, pads)
    out = [
        (x.shape[i + 2] - dilation[i] * (w.shape[i + 2] - 1) - 1) // stride[i] + 1
        for i in range(dim)
    ]
    y = x.new_zeros(())
    for tap in itertools.product(*(range(k) for k in w.shape[2:])):
        part, weight = x, w
        for i in range(dim):
            start = tap[i] * dilation[i]
            part = part.narrow(i + 2, start, (out[i] - 1) * stride[i] + 1)
            part = part[(slice(None),) * (i + 2) + (slice(None, None, stride[i]),)]
        for position in tap:
            weight = weight.select(2, position)
        part = part.unflatten(1, (groups, -1)).flatten(3)  # [N, G, C / G, positions]
        weight = weight.unflatten(0, (groups, -1))  # [G, K / G, C / G]
        y = y + torch.einsum("ngcp,gkc->ngkp", part, weight)
    return y.flatten(1, 2).unflatten(2, out)


def conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride,
    padding,
    dilation,
    groups: int,
    transposed: bool,
    output_padding,
) -> Tensor:
    """As `torch_convfix.functional.conv_forward`, every spatial parameter a list."""
    if not transposed:
        y = _plain(x, w, stride, padding, dilation, groups)
    else:
        size = [
            (x.shape[i + 2] - 1) * stride[i]
            - 2 * padding[i]
            + dilation[i] * (w.shape[i + 2] - 1)
            + output_padding[i]
            + 1
            for i in range(w.dim() - 2)
        ]
        # Output padding enlarges the result, and can leave positions that no input reaches.
        out = x.new_zeros(x.shape[0], w.shape[1] * groups, *size)
        keep: Any = (..., *(slice(0, n) for n in x.shape[2:]))
        _, transpose = torch.func.vjp(
            lambda out: _plain(out, w, stride, padding, dilation, groups)[keep], out
        )
        (y,) = transpose(x)
    return y if b is None else y + b.reshape(1, -1, *(1,) * (w.dim() - 2))
