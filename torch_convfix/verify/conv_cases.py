"""Convolution geometries: a declared table, random ones, and how to make a failing one smaller."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from torch_convfix.verify import reference
from torch_convfix.verify.derivatives import Call, all_stages
from torch_convfix.verify.spelling import spell, tensor

Ints = tuple[int, ...]


@dataclass(frozen=True)
class ConvCase:
    """One convolution, plain or transposed; a tuple has an entry for each spatial dimension."""

    size: Ints
    kernel: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    output_padding: Ints
    transposed: bool = False
    groups: int = 1
    in_per_group: int = 1
    out_per_group: int = 1
    batch: int = 1
    bias: bool = False
    seed: int = 0
    # What the CPU refuses, and a device must refuse: the weight gets a dtype of its own, or the
    # parameters above are out of bounds.
    must_raise: bool = False
    weight_dtype: str = ""

    @property
    def op(self) -> str:
        """The operator's name in PyTorch's database."""
        kind = "conv_transpose" if self.transposed else "conv"
        return f"nn.functional.{kind}{len(self.size)}d"

    @property
    def numel(self) -> int:
        """How large the case is."""
        channels = self.groups * (self.in_per_group + self.out_per_group)
        return self.batch * channels * math.prod(self.size) * math.prod(self.kernel)

    def stages(self, highest: int) -> list[str]:
        """What to compare of it: one order more, and with one channel all compositions."""
        single = self.batch == self.in_per_group == self.out_per_group == 1
        composed = 3 if single and len(self.size) == 1 else 2
        return all_stages(highest + 1, composed=composed, batched=composed if single else 1)

    def valid(self) -> bool:
        """Whether PyTorch defines a result for it."""
        return all(self._valid_in(i) for i in range(len(self.size)))

    def _valid_in(self, i: int) -> bool:
        reach = self.dilation[i] * (self.kernel[i] - 1)
        if not self.transposed:
            return self.size[i] + 2 * self.padding[i] > reach and self.output_padding[i] == 0
        result = (self.size[i] - 1) * self.stride[i] - 2 * self.padding[i] + reach
        return (
            self.output_padding[i] < max(self.stride[i], self.dilation[i])
            and result + self.output_padding[i] + 1 > 0
        )

    def arguments(self) -> tuple[object, ...]:
        """The positional arguments of the PyTorch function."""
        channels_in, channels_out = (
            self.groups * self.in_per_group,
            self.groups * self.out_per_group,
        )
        weight = (
            (channels_in, self.out_per_group)
            if self.transposed
            else (channels_out, self.in_per_group)
        )
        dtype = getattr(torch, self.weight_dtype or "float64")
        w = tensor(*weight, *self.kernel, seed=self.seed + 1, dtype=dtype)
        return (
            tensor(self.batch, channels_in, *self.size, seed=self.seed),
            w,
            tensor(channels_out, seed=self.seed + 2) if self.bias else None,
            self.stride,
            self.padding,
            *(
                (self.output_padding, self.groups, self.dilation)
                if self.transposed
                else (self.dilation, self.groups)
            ),
        )

    def call(self) -> Call:
        """The call to compare."""
        return Call(
            getattr(torch.nn.functional, self.op.rsplit(".", 1)[1]),
            self.arguments(),
            reference=None if self.must_raise else references[self.op],
            must_raise=self.must_raise,
        )

    def spell(self) -> str:
        """The arguments of `check` that repeat it."""
        return spell(self.op, self.arguments(), {})


def _formula(transposed: bool, dim: int) -> Callable[..., Tensor]:
    def spread(value: int | Ints) -> Ints:
        return (value,) * dim if isinstance(value, int) else tuple(value) * (dim // len(value))

    def conv(input, weight, bias, stride, padding, output_padding, groups, dilation) -> Tensor:
        stride, dilation, output_padding = map(spread, (stride, dilation, output_padding))
        batched = input.dim() == dim + 2
        x = input if batched else input.unsqueeze(0)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            x = torch.nn.functional.pad(
                x, [p for n in reversed(total) for p in (n // 2, n - n // 2)]
            )
        padding = spread(0 if isinstance(padding, str) else padding)
        y = reference.conv(
            x, weight, bias, stride, padding, dilation, groups, transposed, output_padding
        )
        return y if batched else y.squeeze(0)

    if transposed:

        def conv_transpose(
            input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
        ) -> Tensor:
            return conv(input, weight, bias, stride, padding, output_padding, groups, dilation)

        return conv_transpose

    def plain(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Tensor:
        return conv(input, weight, bias, stride, padding, 0, groups, dilation)

    return plain


# The independent formula for each convolution of torch.nn.functional, with its signature.
references = {
    f"nn.functional.conv{'_transpose' * transposed}{dim}d": _formula(transposed, dim)
    for transposed in (False, True)
    for dim in (1, 2, 3)
}


class _Rest(TypedDict, total=False):
    transposed: bool
    groups: int
    bias: bool
    must_raise: bool
    weight_dtype: str


def _case(
    dim: int,
    size: int | Ints = 5,
    *,
    kernel: int | Ints = 3,
    stride: int | Ints = 1,
    padding: int | Ints = 1,
    dilation: int | Ints = 1,
    output_padding: int | Ints = 0,
    in_per_group: int = 2,
    out_per_group: int = 2,
    batch: int = 2,
    **rest: Unpack[_Rest],
) -> ConvCase:
    def spread(value: int | Ints) -> Ints:
        return (value,) * dim if isinstance(value, int) else value

    return ConvCase(
        spread(size),
        spread(kernel),
        spread(stride),
        spread(padding),
        spread(dilation),
        spread(output_padding),
        in_per_group=in_per_group,
        out_per_group=out_per_group,
        batch=batch,
        **rest,
    )


def declared() -> Iterator[ConvCase]:
    """The geometries that each have a name in practice, in every number of dimensions."""
    kinds = [
        partial(_case),
        partial(_case, padding=0, bias=True),
        partial(_case, stride=2, bias=True),
        partial(_case, stride=3, kernel=2, padding=0),
        partial(_case, dilation=2, padding=2),
        partial(_case, kernel=1, padding=0),
        partial(_case, groups=2, stride=2, bias=True),
        partial(_case, groups=3, in_per_group=1, out_per_group=1),
        partial(_case, groups=2, in_per_group=1, out_per_group=3, stride=2),
        partial(_case, batch=0),
        partial(_case, batch=1, in_per_group=1, out_per_group=1, kernel=4, padding=2),
    ]
    for dim, size in ((1, 7), (2, 5), (3, 4)):
        for transposed in (False, True):
            for kind in kinds:
                yield kind(dim, size, transposed=transposed)
        for kind in (
            partial(_case, stride=2, output_padding=1, bias=True),
            partial(_case, stride=2, output_padding=1, groups=2),
            # As large as a stride and more: the case that backends forget.
            partial(_case, dilation=2, output_padding=1),
            partial(_case, dilation=3, output_padding=2, kernel=2, groups=2),
            partial(_case, stride=2, dilation=4, output_padding=3, kernel=2, padding=2),
        ):
            yield kind(dim, max(size - 2, 2), transposed=True)
    yield _case(2, (6, 4), kernel=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    yield _case(
        2,
        (3, 4),
        transposed=True,
        kernel=(3, 2),
        stride=(1, 2),
        dilation=(2, 1),
        output_padding=(1, 1),
    )
    yield _case(2, out_per_group=0, must_raise=True)
    yield _case(2, out_per_group=0, transposed=True, must_raise=True)
    yield _case(2, weight_dtype="bfloat16", must_raise=True)
    yield _case(2, transposed=True, stride=2, output_padding=2, must_raise=True)


def draw(random: Random) -> ConvCase:
    """A random valid geometry."""
    while True:
        dim = random.choice((1, 2, 2, 3))
        transposed = random.random() < 0.5

        def each(low: int, high: int, dim: int = dim) -> Ints:
            return tuple(random.randint(low, high) for _ in range(dim))

        largest = (9, 6, 4)[dim - 1]
        case = ConvCase(
            size=each(1, largest),
            kernel=each(1, 3 if dim > 1 else 5),
            stride=each(1, 3),
            padding=each(0, 2),
            dilation=each(1, 3),
            output_padding=each(0, 2) if transposed else (0,) * dim,
            transposed=transposed,
            groups=random.choice((1, 1, 2, 3)),
            in_per_group=random.randint(1, 3),
            out_per_group=random.randint(1, 3),
            batch=random.randint(1, 3),
            bias=random.random() < 0.5,
            seed=random.randrange(1000),
        )
        if case.valid():
            return case


_LEAST = {
    "groups": 1, "in_per_group": 1, "out_per_group": 1, "batch": 1, "bias": False, "seed": 0,
    "padding": 0, "output_padding": 0, "stride": 1, "dilation": 1, "kernel": 1, "size": 1,
}  # fmt: skip
_SPATIAL = ("padding", "output_padding", "stride", "dilation", "kernel", "size")


def _with(case: ConvCase, name: str, value: Any) -> ConvCase:
    return replace(case, **{name: value})


def _smaller(case: ConvCase) -> Iterator[ConvCase]:
    for name, least in _LEAST.items():
        value = getattr(case, name)
        if name not in _SPATIAL:
            for less in dict.fromkeys((least, value - 1)):
                if value > least:
                    yield _with(case, name, type(value)(less))
            continue
        for i in range(len(value)):
            for less in dict.fromkeys((least, value[i] - 1)):
                if value[i] > least:
                    yield _with(case, name, (*value[:i], less, *value[i + 1 :]))


def shrink(case: ConvCase, fails: Callable[[ConvCase], bool], most: int = 150) -> ConvCase:
    """The smallest case that one-step reductions reach while ``fails`` holds of each."""
    tried = {case}
    found = True
    while found:
        found = False
        for smaller in _smaller(case):
            if smaller in tried or smaller.valid() == case.must_raise:
                continue
            if len(tried) > most:
                return case
            tried.add(smaller)
            if fails(smaller):
                case, found = smaller, True
                break
    return case
