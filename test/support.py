"""What the tests of convolutions share: cases, derivatives of a given order, the error measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from reference import conv
from torch import Tensor
from torch.nn import functional as F

from torch_convfix.functional import conv_forward

_CONV = {(d, t): getattr(F, f"conv{'_transpose' * t}{d}d") for d in (1, 2, 3) for t in (0, 1)}


@dataclass(frozen=True)
class Case:
    """One convolution; every spatial parameter has an entry a dimension."""

    input_size: tuple[int, ...]
    weight_size: tuple[int, ...]
    bias: bool = False
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] | str = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0)

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = [self.input_size, self.weight_size]
        if self.bias:
            k = self.weight_size[1] * self.groups if self.transposed else self.weight_size[0]
            sizes.append((k,))
        return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]

    def apply(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Through torch.nn.functional."""
        function = _CONV[w.dim() - 2, self.transposed]
        if self.transposed:
            return function(
                x, w, b, self.stride, self.padding, self.output_padding, self.groups, self.dilation
            )
        return function(x, w, b, self.stride, self.padding, self.dilation, self.groups)

    def reference(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Written out in slices and contractions."""
        batched = x.dim() == w.dim()
        x = x if batched else x.unsqueeze(0)
        padding = self.padding
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, w.shape[2:], strict=True)]
            x = F.pad(x, [p for t in reversed(total) for p in (t // 2, t - t // 2)])
            padding = (0,) * (w.dim() - 2)
        elif padding == "valid":
            padding = (0,) * (w.dim() - 2)
        y = conv(
            x,
            w,
            b,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            self.transposed,
            self.output_padding,
        )
        return y if batched else y.squeeze(0)


def stock_can(case: Case) -> bool:
    """Whether PyTorch's own double backward can do it: on an empty batch it cannot."""
    return 0 not in case.input_size


def derivatives(fn: Callable[..., Tensor], inputs: Sequence[Tensor], order: int) -> list[Tensor]:
    """The value, then the gradients of each order: each time of the sum of the squares of the last.

    A tanh keeps the derivatives of what is linear from vanishing.
    """
    inputs = [t.detach().requires_grad_() for t in inputs]
    return orders(fn(*inputs), inputs, order)


def orders(value: Tensor, inputs: Sequence[Tensor], order: int) -> list[Tensor]:
    """`derivatives` of a value that is computed already, by leaves that it depends on."""
    results = [value.detach()]
    last = [torch.tanh(value)]
    for i in range(order):
        scalar = sum((t * t).sum() for t in last)
        last = torch.autograd.grad(scalar, inputs, create_graph=i + 1 < order)
        results += [t.detach() for t in last]
    return results


def penalty_step(layer: dict[str, Any]) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
    """One gradient-penalty step of ``conv_forward(x, w, **layer)``, by w and x."""

    def step(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        gradients = torch.autograd.grad(
            torch.tanh(conv_forward(x, w, **layer)).mean(), [w, x], create_graph=True
        )
        return torch.autograd.grad(sum((g * g).sum() for g in gradients), [w, x])

    return step


def worst_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest deviation, in units of the largest entry of the tensor that it is in."""
    assert [g.shape for g in got] == [w.shape for w in want]
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        if w.numel():
            error = (g.double() - w).abs().max() / w.abs().max().clamp_min(1e-30)
            worst = max(worst, error.item() if error == error else float("inf"))
    return worst


def check_many(check: Callable[..., None], strategy: st.SearchStrategy[Any], count: float) -> None:
    """Call ``check`` with ``count`` draws."""
    hypothesis.settings(max_examples=int(count))(hypothesis.given(strategy)(check))()


@st.composite
def cases(
    draw: st.DrawFn,
    batched: bool | None = None,
    dim: int | None = None,
    transposed: bool | None = None,
) -> Case:
    """Geometries of every kind that PyTorch takes, small enough to differentiate three times."""
    dim = draw(st.integers(1, 3)) if dim is None else dim
    transposed = draw(st.booleans()) if transposed is None else transposed

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dim))

    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    depthwise = groups > 1 and draw(st.booleans())
    per_group = 1 if depthwise else draw(st.integers(1, 2))
    multiplier = draw(st.integers(1, 2))
    kernel = each(1, 3)
    stride, dilation = each(1, 3), each(1, 3)
    window = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    padding: tuple[int, ...] | str = tuple(draw(st.integers(0, w // 2 + 1)) for w in window)
    if not transposed and draw(st.integers(0, 9)) == 0:
        padding = draw(st.sampled_from(["same", "valid"]))
        stride = (1,) * dim if padding == "same" else stride
    pads = (0,) * dim if isinstance(padding, str) else padding
    output_padding = (0,) * dim
    if transposed:
        output_padding = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
        # The smallest input whose result is not empty, and a little more.
        least = [
            max(1, -(-(2 * p - w - o + 1) // s) + 1)
            for p, w, o, s in zip(pads, window, output_padding, stride, strict=True)
        ]
    else:
        least = [max(1, w - 2 * p) for w, p in zip(window, pads, strict=True)]
    most_extra = {1: 6, 2: 3, 3: 2}[dim]
    spatial = tuple(n + draw(st.integers(0, most_extra)) for n in least)
    channels_in, channels_out = groups * per_group, groups * multiplier
    weight = (channels_in, multiplier) if transposed else (channels_out, per_group)
    has_batch = draw(st.integers(0, 5)) > 0 if batched is None else batched
    batch = (draw(st.sampled_from([1, 2, 2, 3, 0])),) if has_batch else ()
    return Case(
        (*batch, channels_in, *spatial),
        (*weight, *kernel),
        draw(st.booleans()),
        stride,
        padding,
        dilation,
        groups,
        transposed,
        output_padding,
    )
