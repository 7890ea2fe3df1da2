"""`scaled_dot_product_attention`: its kinds, inputs, a formula written out, and layers of it."""

import math

import torch
from torch import Tensor, nn


def formula(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """From the documentation; a query that may attend to nothing gets zeros."""
    if enable_gqa:
        k, v = (torch.stack([t] * (q.shape[1] // t.shape[1]), 2).flatten(1, 2) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weight = torch.exp(torch.einsum("bhle,bhse->bhls", q, k) * scale)
    if is_causal:
        weight = weight * torch.ones(q.shape[2], k.shape[2], dtype=q.dtype).tril()
    if attn_mask is not None:
        weight = weight * (attn_mask if attn_mask.dtype == torch.bool else attn_mask.exp())
    total = weight.sum(-1, keepdim=True)
    return torch.einsum("bhls,bhse->bhle", weight / torch.where(total == 0, 1, total), v)


def tensors(heads: int = 2, queries: int = 4, keys: int = 4, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 4, queries, 3)] + [(2, heads, keys, 3)] * 2
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


BOOL_MASK = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]) > 0
FLOAT_MASK = torch.randn(
    2, 1, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64
)
KINDS = {
    "plain": (tensors(4), {}),
    "other lengths": (tensors(4, 3, 5), {}),
    "causal": (tensors(4), {"is_causal": True}),
    "causal, fewer queries": (tensors(4, 3, 5), {"is_causal": True}),
    "causal, more queries": (tensors(4, 5, 3), {"is_causal": True}),
    "bool mask": (tensors(4, 4, 5), {"attn_mask": BOOL_MASK}),
    "float mask": (tensors(4, 4, 5), {"attn_mask": FLOAT_MASK}),
    "float mask with -inf": (
        tensors(4, 4, 5),
        {"attn_mask": FLOAT_MASK.masked_fill(~BOOL_MASK, -math.inf)},
    ),
    "scale": (tensors(4), {"scale": 0.3}),
    "negative scale": (tensors(4), {"scale": -0.7}),
    "grouped queries": (tensors(2), {"enable_gqa": True}),
    "one head of keys, causal": (tensors(1), {"enable_gqa": True, "is_causal": True}),
}


def penalty(net: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    (gx,) = torch.autograd.grad(torch.tanh(net(x)).sum(), x, create_graph=True)
    return list(torch.autograd.grad(gx.square().sum(), [x, *net.parameters()], allow_unused=True))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
