"""A checkpointed function and its derivatives, for each device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def block(x: Tensor, w: Tensor) -> Tensor:
    return F.max_pool2d(F.elu(F.conv2d(x.sin(), w, padding=1), inplace=True), 2)


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 8, 8), (3, 3, 3, 3)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in sizes]


def derivatives(apply: Callable[..., Any], order: int, x: Tensor, w: Tensor) -> list[Tensor]:
    """The value, and derivatives of the penalty on those of the order before."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss = apply(block, apply(block, x, w), w).sin().sum()
    results = [loss]
    for _ in range(order):
        grads = torch.autograd.grad(loss, [x, w], create_graph=True)
        results += grads
        loss = sum(g.square().sum() for g in grads)
    return [t.detach() for t in results]
