"""Convolution layers whose masked weights are never read, and ready masks for them."""

from .conv import MaskedConv1d, MaskedConv2d, MaskedConv3d, MaskedConvTranspose2d
from .masks import causal_mask, causal_mask_1d, checkerboard_mask

__all__ = [
    "MaskedConv1d",
    "MaskedConv2d",
    "MaskedConv3d",
    "MaskedConvTranspose2d",
    "causal_mask",
    "causal_mask_1d",
    "checkerboard_mask",
]
