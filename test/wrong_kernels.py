"""Deliberately wrong convolution kernels for the CPU: what verify must find.

Imported with CONVFIX_MUTATION in the environment, registers that one: a backend with a fault.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, library

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

SIGN, FLIP, GROUPS, PADDING, BIAS = (
    "sign",
    "flipped kernel",
    "swapped groups",
    "lost padding",
    "bias",
)


def _flip(w: Tensor) -> Tensor:
    return w.flip(list(range(2, w.dim())))


def _swap_groups(w: Tensor, groups: int) -> Tensor:
    return w.roll(w.shape[0] // groups, 0)


def _lose_border(t: Tensor, padding: list[int]) -> Tensor:
    t = t.clone()
    for i, p in enumerate(padding):
        t.narrow(i + 2, 0, min(p, t.shape[i + 2])).zero_()
    return t


def _weight(w: Tensor, fault: str, groups: int) -> Tensor:
    return {FLIP: _flip(w), GROUPS: _swap_groups(w, groups)}.get(fault, w)


def _forward(fault: str) -> Callable[..., Tensor]:
    right = library.get_kernel("aten::convolution", "CPU")

    def convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
        rest = (stride, padding, dilation, transposed, output_padding, groups)
        y = right.call_boxed(
            _CPU, x, _weight(w, fault, groups), None if fault == BIAS else b, *rest
        )
        return {SIGN: -y, PADDING: _lose_border(y, padding)}.get(fault, y)

    return convolution


def _backward(which: str, fault: str) -> Callable[..., tuple[Tensor | None, ...]]:
    right = library.get_kernel("aten::convolution_backward", "CPU")

    def convolution_backward(
        g, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask
    ):
        rest = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask)
        dx, dw, db = right.call_boxed(_CPU, g, x, w, *rest)
        if which == "I" and dx is not None:
            wrong = right.call_boxed(_CPU, g, x, _weight(w, fault, groups), *rest)[0]
            dx = {SIGN: -dx, PADDING: _lose_border(dx, padding)}.get(fault, wrong)
        if which == "W" and dw is not None:
            lost = right.call_boxed(_CPU, _lose_border(g, padding), x, w, *rest)[1]
            dw = {SIGN: -dw, PADDING: lost}.get(fault, _weight(dw, fault, groups))
        if which == "W" and fault == BIAS and db is not None:
            db = torch.zeros_like(db)
        return dx, dw, db

    return convolution_backward


def _double_backward(fault: str) -> Callable[..., tuple[Tensor | None, ...]]:
    def convolution_double_backward(
        ggI, ggW, ggb, g, w, x, stride, padding, dilation, transposed, output_padding, groups, mask
    ):
        rest = (stride, padding, dilation, transposed, output_padding, groups)
        wrong_ggW = ggW if ggW is None else _weight(ggW, fault, groups)
        terms = []
        if ggI is not None:
            terms.append(torch.convolution(ggI, w, None, *rest))
        if ggW is not None:
            terms.append(torch.convolution(x, wrong_ggW, None, *rest))
        if ggb is not None and fault != BIAS:
            terms.append(ggb.reshape(-1, *[1] * (g.dim() - 2)).expand_as(g))
        ggO = sum(terms) if terms else None
        gI = gW = None
        backward = torch.ops.aten.convolution_backward
        if ggW is not None:
            gI = backward(g, x, wrong_ggW, None, *rest, [True, False, False])[0]
        if ggI is not None:
            gW = backward(g, ggI, w, None, *rest, [False, True, False])[1]
        if fault == SIGN and gI is not None:
            gI = -gI
        if fault == PADDING and gI is not None:
            border = torch.ones_like(gI)
            gI = gI * _lose_border(border, padding)
        return ggO, gI, gW

    return convolution_double_backward


MUTATIONS = {
    f"{which}, {fault}": (which, fault)
    for which in ("F", "I", "W", "double backward")
    for fault in (SIGN, FLIP, GROUPS, PADDING, BIAS)
    if (which, fault) != ("I", BIAS)
}


@contextmanager
def registered(name: str) -> Iterator[None]:
    """The device's kernels with one mutation."""
    which, fault = MUTATIONS[name]
    kernels = library.Library("aten", "IMPL")
    if which == "F":
        kernels.impl("convolution", _forward(fault), "CPU")
    elif which == "double backward":
        kernels.impl("_convolution_double_backward", _double_backward(fault), "AutogradCPU")
    else:
        kernels.impl("convolution_backward", _backward(which, fault), "CPU")
    try:
        yield
    finally:
        kernels._destroy()


@contextmanager
def wrong_after_a_write() -> Iterator[None]:
    """A max pool of float32 whose gradient is wrong where its input was written in place, and only there:
    no call of it alone shows the fault."""

    def max_pool2d(x, kernel_size, stride=(), padding=(0, 0), dilation=(1, 1), ceil_mode=False):
        args = (kernel_size, stride, padding, dilation, ceil_mode)
        y = torch.ops.aten.max_pool2d_with_indices(x, *args)[0]
        wrong = x.dtype == torch.float32 and x._version
        return y + (y - y.detach()) / 2 if wrong else y

    kernels = library.Library("aten", "IMPL")
    kernels.impl("max_pool2d", max_pool2d, "AutogradCPU")
    try:
        yield
    finally:
        kernels._destroy()


if "CONVFIX_MUTATION" in os.environ:
    _kept = registered(os.environ["CONVFIX_MUTATION"])
    _kept.__enter__()
