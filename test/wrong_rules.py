"""x ** 3 with one wrong rule, that one composition of transforms alone can see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _function(
    value: Callable[..., Tensor],
    backward: Callable[..., Any],
    jvp: Callable[..., Tensor],
) -> Callable[..., Tensor]:
    """``value(*inputs)`` with ``backward(g, *inputs)`` and ``jvp(*inputs, *tangents)``."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Tensor) -> Tensor:
            return value(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return backward(g, *ctx.saved_tensors)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
            return jvp(*ctx.saved_tensors, *tangents)

    return Function.apply


def cube(wrong: str = "") -> Callable[[Tensor], Tensor]:
    """``wrong`` names the stage whose rule loses its factor of two."""

    def factor(stage: str) -> float:
        return 3.0 if stage == wrong else 6.0

    gradient = _function(
        lambda g, x: 3 * g * x * x,
        lambda h, g, x: (3 * h * x * x, factor("order 2") * h * g * x),
        lambda g, x, dg, dx: 3 * dg * x * x + factor("forward over reverse") * g * x * dx,
    )
    tangent = _function(
        lambda x, t: 3 * x * x * t,
        lambda g, x, t: (factor("reverse over forward") * g * x * t, 3 * g * x * x),
        lambda x, t, dx, dt: factor("forward over forward") * x * t * dx + 3 * x * x * dt,
    )
    return _function(lambda x: x**3, gradient, tangent)
