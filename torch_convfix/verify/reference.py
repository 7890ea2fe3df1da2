"""A convolution written out in slices and contractions: the independent formula that tests hold
every convolution against. It shares nothing with any convolution kernel, and differentiates to any
order by ordinary autograd (PyTorch's own CPU convolution does not: the third derivative of a
transposed convolution with output padding raises there)."""

import itertools

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


def _transposed(
    x: Tensor, w: Tensor, stride, padding, dilation, groups: int, output_padding
) -> Tensor:
    dim = w.dim() - 2
    size = list(x.shape[2:])
    steps = [(n - 1) * s + 1 for n, s in zip(size, stride, strict=True)]
    x = x.unflatten(1, (groups, -1)).flatten(3)  # [N, G, C / G, positions]
    y = x.new_zeros(())
    for tap in itertools.product(*(range(k) for k in w.shape[2:])):
        weight = w
        for position in tap:
            weight = weight.select(2, position)
        weight = weight.unflatten(0, (groups, -1))  # [G, C / G, K / G]
        part = torch.einsum("ngcp,gck->ngkp", x, weight).flatten(1, 2).unflatten(2, size)
        pads: list[int] = []
        for i in range(dim):  # spread the positions by the stride, then shift by the tap
            part = part.unsqueeze(i + 3)
            part = torch.nn.functional.pad(part, [0, 0] * (dim - 1 - i) + [0, stride[i] - 1])
            part = part.flatten(i + 2, i + 3).narrow(i + 2, 0, steps[i])
            before = tap[i] * dilation[i]
            after = (w.shape[i + 2] - 1) * dilation[i] - before + output_padding[i]
            pads = [before, after, *pads]
        y = y + torch.nn.functional.pad(part, pads)
    for i in range(dim):
        y = y.narrow(i + 2, padding[i], y.shape[i + 2] - 2 * padding[i])
    return y


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
    if transposed:
        y = _transposed(x, w, stride, padding, dilation, groups, output_padding)
    else:
        y = _plain(x, w, stride, padding, dilation, groups)
    return y if b is None else y + b.reshape(1, -1, *(1,) * (w.dim() - 2))
