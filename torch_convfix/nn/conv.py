"""Masked twins of torch.nn's convolutions: the masked weights are never read."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_convfix.masked.application import Algorithm, apply_cover
from torch_convfix.masked.cover import check_mask, cover


class _Masked(nn.modules.conv._ConvNd):
    """What every masked layer shares; the mask's cut is chosen once, here.

    Args beside those of the torch.nn layer:
        mask: 0/1, broadcastable to the weight: (out, in / groups, *kernel), transposed
            (in, out / groups, *kernel). Its values must be on hand (no meta tensor).
        algorithm: see `torch_convfix.functional.masked_conv`.

    `exact` is False where the mask has no structure across channel pairs: then the kernel is
    multiplied (one warning at construction) and masked inputs may leak. Taps that every channel
    pair masks are left out even so.

    The parameter is the full weight, as in torch.nn, and its masked entries get gradients of
    exactly zero. `mask` is a buffer outside the state_dict, which is thus that of the plain layer;
    a state_dict that has a `mask` (the usual masked layer's) loads if it is the same mask.
    """

    mask: torch.Tensor

    def __init__(
        self, *args: Any, mask: torch.Tensor, algorithm: Algorithm = "auto", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if algorithm not in ("auto", "direct", "im2col"):
            raise ValueError(f'algorithm: got {algorithm!r}; use "auto", "direct" or "im2col"')
        self.algorithm = algorithm
        self._cover = cover(mask, self.weight.shape, self.groups, self.transposed)
        self.register_buffer("mask", mask.bool().to(self.weight.device), persistent=False)

    @property
    def exact(self) -> bool:
        """Whether no masked weight is ever read."""
        return self._cover.exact

    def extra_repr(self) -> str:
        pieces = f"convolutions={self._cover.convolutions}, exact={self.exact}"
        return f"{super().extra_repr()}, algorithm={self.algorithm!r}, {pieces}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        other = state_dict.pop(f"{prefix}mask", None)
        super()._load_from_state_dict(state_dict, prefix, *args)
        shape = self.weight.shape
        if other is not None and not torch.equal(
            check_mask(other, shape), check_mask(self.mask, shape)
        ):
            args[-1].append(f"{prefix}mask: differs from the mask this layer was built with")


class _MaskedConv(_Masked):
    def _conv_forward(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        padding: str | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * (weight.dim() - 2)
        return apply_cover(
            self._cover,
            self.mask,
            input,
            weight,
            bias,
            self.stride,
            padding,
            self.dilation,
            algorithm=self.algorithm,
        )


class MaskedConv1d(_MaskedConv, nn.Conv1d):
    """nn.Conv1d with `mask=` and `algorithm=`."""


class MaskedConv2d(_MaskedConv, nn.Conv2d):
    """nn.Conv2d with `mask=` and `algorithm=`."""


class MaskedConv3d(_MaskedConv, nn.Conv3d):
    """nn.Conv3d with `mask=` and `algorithm=`."""


class MaskedConvTranspose2d(_Masked, nn.ConvTranspose2d):
    """nn.ConvTranspose2d with `mask=` and `algorithm=`."""

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        output_padding = self._output_padding(
            input,
            output_size,
            list(self.stride),
            cast("list[int]", self.padding),
            list(self.kernel_size),
            2,
            list(self.dilation),
        )
        return apply_cover(
            self._cover,
            self.mask,
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            output_padding,
            True,
            self.algorithm,
        )
