"""Convolutions whose masked weights are never read.

A kernel multiplied by a 0/1 mask still reads the masked inputs: 0 * NaN is NaN, and a Winograd or
FFT kernel mixes neighbouring taps before it subtracts them again. Here the kernel is cut into the
dense pieces of a `Cover`, and the pieces are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from torch_convfix.masked.cover import Block, Box, Cover, cover

Algorithm = Literal["auto", "direct", "im2col"]
Size = int | Sequence[int]

# Up to here gathering the taps is faster than cut kernels (bench/masked_conv.py).
FEW_CHANNELS = 4  # PyTorch's CPU kernels, input channels
FEW_READS = 48  # XLA:CPU, kept weights of an output channel

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def masked_conv(
    input: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    algorithm: Algorithm = "auto",
) -> torch.Tensor:
    """The 1-d, 2-d or 3-d convolution by `weight * mask` that never reads a masked weight.

    Args:
        input: (batch, in, *size) or (in, *size).
        weight: (out, in / groups, *kernel), any floating dtype.
        mask: 0/1, broadcastable to `weight`. Keep it on the CPU: its values choose the cut, here
            at every call (`torch_convfix.nn` chooses once).
        bias: (out,).
        padding: a number, one a dimension, "valid" or "same".
        algorithm: "direct" gives each dense piece to the device's own convolution. "im2col" gathers
            the kept taps for one matrix product, which cannot mix taps. "auto" is "im2col" where the
            device's library is known to use Winograd or FFT kernels (cuDNN, MPS, NNPACK), and where
            it is faster: on a CPU for up to 4 input channels, on XLA:CPU for up to 48 kept weights
            an output channel; else "direct".

    Raises:
        ValueError: for a mask that is not 0/1 or does not broadcast, and for sizes that do not fit.

    A mask without structure across channel pairs is multiplied, with a warning.
    """
    plan = cover(mask, weight.shape, groups)
    return apply_cover(
        plan, mask, input, weight, bias, stride, padding, dilation, algorithm=algorithm
    )


def masked_conv_transpose(
    input: torch.Tensor,
    weight: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    algorithm: Algorithm = "auto",
) -> torch.Tensor:
    """`masked_conv` for a transposed convolution; `weight` is (in, out / groups, *kernel)."""
    plan = cover(mask, weight.shape, groups, transposed=True)
    return apply_cover(
        plan, mask, input, weight, bias, stride, padding, dilation, output_padding, True, algorithm
    )


def apply_cover(
    plan: Cover,
    mask: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Size,
    padding: Size | str,
    dilation: Size,
    output_padding: Size = 0,
    transposed: bool = False,
    algorithm: Algorithm = "auto",
) -> torch.Tensor:
    """The sum of the pieces of `plan`; `mask` is read only where `plan.exact` is False."""
    n = weight.dim() - 2
    groups, outs, ins = plan.channels
    if algorithm not in ("auto", "direct", "im2col"):
        raise ValueError(f'algorithm: got {algorithm!r}; use "auto", "direct" or "im2col"')
    if input.dim() not in (n + 1, n + 2) or input.shape[-n - 1] != groups * ins:
        raise ValueError(
            f"input: got shape {tuple(input.shape)}; a weight of shape {tuple(weight.shape)} with "
            f"groups={groups} takes ([batch,] {groups * ins}, {n} spatial dimensions)"
        )
    axes = _axes(
        input.shape[-n:], weight.shape[2:], stride, padding, dilation, output_padding, transposed
    )
    if not plan.exact:
        weight = torch.where(mask.to(weight.device) != 0, weight, 0)
    x = input.unflatten(-n - 1, (groups, ins))
    x = x.unsqueeze(0) if input.dim() == n + 1 else x
    w = weight.unflatten(0, (groups, -1))

    total = None
    for block in plan.blocks:
        x_block = _select(_select(x, 1, block.groups), 2, block.ins)
        rows, columns = (block.ins, block.outs) if transposed else (block.outs, block.ins)
        w_block = _select(_select(_select(w, 0, block.groups), 1, rows), 2, columns)
        im2col = algorithm == "im2col"
        if algorithm == "auto":
            im2col = _gathers(input.device.type, block)
        # The first piece of a whole block can add the bias, which saves a pass.
        whole = len(block.groups) * len(block.outs) == groups * outs
        fused = bias if whole and total is None and (im2col or not transposed) else None
        if im2col:
            pieces = iter([_im2col(axes, block, x_block, w_block, fused, transposed)])
        elif transposed:
            pieces = _direct_transpose(axes, block, x_block, w_block)
        else:
            pieces = _direct(axes, block, x_block, w_block, fused)
        for y in pieces:
            if not whole:
                y = y.unflatten(1, (len(block.groups), len(block.outs)))
                y = _place(_place(y, 1, block.groups, groups), 2, block.outs, outs).flatten(1, 2)
            total = y if total is None else total + y
        bias = bias if fused is None or total is None else None
    if total is None:
        # Nothing is read; the empty sums keep input and weight in the graph, with zero gradients.
        total = input.new_zeros(x.shape[0], groups * outs, *[axis.output for axis in axes])
        total = total + (input.flatten()[:0].sum() + weight.flatten()[:0].sum())
    total = total if bias is None else total + bias.view(-1, *[1] * n)
    return total.squeeze(0) if input.dim() == n + 1 else total


class _Axis(NamedTuple):
    """One spatial dimension: where each tap of the full kernel reads (or, transposed, writes)."""

    size: int
    stride: int
    dilation: int
    low: int
    output: int

    def reads(self, taps: range) -> tuple[int, int]:
        """How many zeros a sub-kernel needs before and after the input; below 0: cut it."""
        first = taps[0] * self.dilation - self.low
        last = taps[-1] * self.dilation - self.low + (self.output - 1) * self.stride
        return -first, last - (self.size - 1)

    def writes(self, taps: range) -> tuple[tuple[int, int], tuple[int, int]]:
        """Transposed: what to cut from the input, and to add to what comes out; below 0: cut it."""
        first, last = (taps[i] * self.dilation - self.low for i in (0, -1))
        begin = max(0, -(last // self.stride))  # inputs before it write before the output
        end = min(self.size, max(0, -((first - self.output) // self.stride)))
        after = self.output - 1 - ((end - 1) * self.stride + last)
        return (-begin, end - self.size), (begin * self.stride + first, after)


def _axes(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Size,
    padding: Size | str,
    dilation: Size,
    output_padding: Size,
    transposed: bool,
) -> list[_Axis]:
    n = len(size)
    strides, dilations, extras = (_ntuple(v, n) for v in (stride, dilation, output_padding))
    if isinstance(padding, str) and padding not in ("valid", "same"):
        raise ValueError(f'padding: got {padding!r}; use numbers, "valid" or "same"')
    if padding == "same" and any(s != 1 for s in strides):
        raise ValueError(f'padding: "same" needs stride 1, got stride {stride}')
    pads = _ntuple(0 if isinstance(padding, str) else padding, n)
    axes = []
    for i, k, s, d, p, e in zip(size, kernel, strides, dilations, pads, extras, strict=True):
        span = d * (k - 1)
        low, total = (span // 2, span) if padding == "same" else (p, 2 * p)
        if transposed and e >= max(s, d):
            raise ValueError(
                f"output_padding: got {output_padding}; it must be below max(stride, dilation) of "
                f"every dimension, with stride {stride} and dilation {dilation}"
            )
        output = (
            (i - 1) * s - total + span + e + 1 if transposed else (i + total - span - 1) // s + 1
        )
        if output <= 0:
            raise ValueError(
                f"input: spatial size {tuple(size)} leaves no output with kernel {tuple(kernel)}, "
                f"stride {stride}, padding {padding}, dilation {dilation}"
            )
        axes.append(_Axis(i, s, d, low, output))
    return axes


def _direct(
    axes: list[_Axis], block: Block, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """One convolution a box; boxes that meet nothing but padding are left out."""
    convolve, x, w = _CONV[len(axes)], x.flatten(1, 2), w.flatten(0, 1)
    stride = [axis.stride for axis in axes]
    for box in block.boxes:
        margins = [axis.reads(taps) for axis, taps in zip(axes, box, strict=True)]
        # What both sides share is left to the convolution's own padding, which costs no copy.
        shared = [max(0, min(margin)) for margin in margins]
        read = _fit(x, margins, shared)
        if read is not None:
            w_box = w[_taps_of(box)]
            yield convolve(
                read, w_box, bias, stride, shared, _dilation(axes, box), len(block.groups)
            )
            bias = None


def _direct_transpose(
    axes: list[_Axis], block: Block, x: torch.Tensor, w: torch.Tensor
) -> Iterator[torch.Tensor]:
    """One transposed convolution a box, put in its place in the output."""
    convolve, x, w = _CONV_TRANSPOSE[len(axes)], x.flatten(1, 2), w.flatten(0, 1)
    stride = [axis.stride for axis in axes]
    for box in block.boxes:
        cuts, margins = zip(
            *(axis.writes(taps) for axis, taps in zip(axes, box, strict=True)), strict=True
        )
        shared = [min(0, max(margin)) for margin in margins]
        read = _fit(x, cuts)
        if read is not None:
            w_box, padding = w[_taps_of(box)], [-s for s in shared]
            y = convolve(
                read, w_box, None, stride, padding, 0, len(block.groups), _dilation(axes, box)
            )
            placed = _fit(y, margins, shared)
            if placed is not None:
                yield placed


def _im2col(
    axes: list[_Axis],
    block: Block,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    """One matrix product of the kept weights with the inputs that they meet."""
    w = torch.cat([w[_taps_of(box)].flatten(3) for box in block.boxes], 3)
    stride = [axis.stride for axis in axes]
    # Output o of tap t reads input o * stride + offset.
    offsets = [
        [t * axis.dilation - axis.low for axis, t in zip(axes, tap, strict=True)]
        for box in block.boxes
        for tap in itertools.product(*box)
    ]
    if transposed:
        w, x = w.transpose(1, 2), _spread(x, stride)
        stride = [1] * len(axes)
        offsets = [[-o for o in offset] for offset in offsets]
    spans = [(axis.output - 1) * s + 1 for axis, s in zip(axes, stride, strict=True)]
    margins = [
        (max(0, -min(o)), max(0, max(o) + span - size))
        for o, span, size in zip(zip(*offsets, strict=True), spans, x.shape[3:], strict=True)
    ]
    x = F.pad(x, [m for margin in reversed(margins) for m in margin])
    reads = []
    for offset in offsets:
        starts = [o + before for o, (before, _) in zip(offset, margins, strict=True)]
        window = [slice(a, a + m, s) for a, m, s in zip(starts, spans, stride, strict=True)]
        reads.append(x[_index(window)])
    columns = torch.stack(reads, 3).flatten(2, 3)  # (batch, groups, ins * taps, *outputs)
    w = w.flatten(2)
    if x.device.type == "xla":  # a 1 x 1 convolution is the same product, and faster on XLA:CPU
        w = w.flatten(0, 1)[(..., *[None] * len(axes))]
        return _CONV[len(axes)](columns.flatten(1, 2), w, bias, groups=len(block.groups))
    batch, columns = columns.shape[0], columns.flatten(3).flatten(0, 1)
    w = w.expand(batch, -1, -1, -1).flatten(0, 1)
    if bias is None:
        y = torch.bmm(w, columns)
    else:
        bias = bias.view(1, -1, w.shape[1], 1).expand(batch, -1, -1, -1).flatten(0, 1)
        y = torch.baddbmm(bias, w, columns)
    return y.unflatten(0, (batch, -1)).flatten(1, 2).unflatten(-1, [axis.output for axis in axes])


def _index(window: Sequence[slice]) -> tuple[Any, ...]:
    return (..., *window)


def _taps_of(box: Box) -> tuple[Any, ...]:
    return _index([slice(taps.start, taps.stop, taps.step) for taps in box])


def _dilation(axes: list[_Axis], box: Box) -> list[int]:
    return [axis.dilation * taps.step for axis, taps in zip(axes, box, strict=True)]


def _spread(x: torch.Tensor, stride: list[int]) -> torch.Tensor:
    """`stride - 1` zeros between neighbours of every spatial dimension."""
    n = len(stride)
    for i, s in enumerate(stride):
        dim = x.dim() - n + i
        size = (x.shape[dim] - 1) * s + 1
        gaps = F.pad(x.unsqueeze(dim + 1), [0, 0] * (n - i - 1) + [0, s - 1])
        x = gaps.flatten(dim, dim + 1).narrow(dim, 0, size)
    return x


def _fit(
    x: torch.Tensor, margins: Sequence[tuple[int, int]], less: Sequence[int] = ()
) -> torch.Tensor | None:
    """Zeros before and after each spatial dimension, `less` than `margins` says on both sides.

    Below 0 cuts; None where nothing is left of x.
    """
    less = less or [0] * len(margins)
    margins = [(a - m, b - m) for (a, b), m in zip(margins, less, strict=True)]
    sizes = x.shape[-len(margins) :]
    if any(n + min(a, 0) + min(b, 0) <= 0 for n, (a, b) in zip(sizes, margins, strict=True)):
        return None
    pads = [m for margin in reversed(margins) for m in margin]
    # Not narrow: XLA computes the gradient of a pad below 0 as a pad, that of a slice as a select.
    return F.pad(x, pads) if any(pads) else x


def _select(x: torch.Tensor, dim: int, members: tuple[int, ...]) -> torch.Tensor:
    """The slices `members` (ascending) of one dimension; a view where they are neighbours."""
    first, count = members[0], len(members)
    if count == x.shape[dim]:
        return x
    if members[-1] - first + 1 == count:
        return x.narrow(dim, first, count)
    return x.index_select(dim, torch.tensor(members, device=x.device))


def _place(x: torch.Tensor, dim: int, members: tuple[int, ...], size: int) -> torch.Tensor:
    """The reverse of `_select`: zeros in the slices that are not in `members`."""
    first, count = members[0], len(members)
    if count == size:
        return x
    before = [0, 0] * (x.dim() - dim - 1)
    if members[-1] - first + 1 == count:
        return F.pad(x, [*before, first, size - first - count])
    source = [members.index(i) if i in members else count for i in range(size)]
    return F.pad(x, [*before, 0, 1]).index_select(dim, torch.tensor(source, device=x.device))


def _gathers(device: str, block: Block) -> bool:
    """Whether "auto" is "im2col": where convolutions may be Winograd or FFT kernels (cuDNN, MPS,
    NNPACK), and where gathering is faster."""
    if device in ("cuda", "mps"):
        return True
    channels = len(block.groups) * len(block.ins)
    if device == "cpu":
        onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        return not onednn or channels <= FEW_CHANNELS
    return device == "xla" and _planned_for_cpu() and channels * block.taps <= FEW_READS


def _planned_for_cpu() -> bool:
    from torch_convfix import _C  # only here: nothing else in this file needs the core

    options = _C.enabled_options("xla")
    return options is not None and options.hardware == _C.Hardware.cpu


def _ntuple(value: Size, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value)
