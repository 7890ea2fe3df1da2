"""Inputs that can be written down in a line of Python."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Unspellable(TypeError):
    """A value that has no literal."""


def tensor(
    *shape: int,
    low: float = -1.0,
    high: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = True,
) -> Tensor:
    """Uniform random numbers on the CPU, the same ones for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    drawn = (uniform * (high - low) + low).to(dtype).requires_grad_(requires_grad)
    parts = [str(n) for n in shape]
    parts += [f"low={low:g}"] if low != -1 else []
    parts += [f"high={high:g}"] if high != 1 else []
    parts += [f"seed={seed}"] if seed else []
    parts += [f"dtype={dtype}"] if dtype != torch.float64 else []
    parts += [] if requires_grad else ["requires_grad=False"]
    drawn.spelled = f"tensor({', '.join(parts)})"  # type: ignore[attr-defined]
    return drawn


def redrawn(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments with each floating tensor drawn anew, within the bounds that it had."""
    seeds = iter(range(1000))

    def redraw(t: Tensor) -> Tensor:
        if t.layout is not torch.strided or not t.is_floating_point():
            return t
        if not t.numel() or not t.isfinite().all():
            return t
        low, high = (float(f"{v:.3g}") for v in (t.min().item(), t.max().item()))
        return tensor(*t.shape, low=low, high=high, seed=next(seeds), requires_grad=t.requires_grad)

    return pytree.tree_map_only(Tensor, redraw, (tuple(args), dict(kwargs)))


def spell(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of `check`, but for the device, that repeat a call."""
    parts = [repr(op), *(_spell(a) for a in args)]
    return ", ".join(parts + [f"{name}={_spell(value)}" for name, value in kwargs.items()])


def _spell(value: Any) -> str:
    if isinstance(value, Tensor):
        return _spell_tensor(value)
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(_spell, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_spell, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, torch.dtype | bool | int | float | complex | str | slice | type(None)):
        return repr(value)
    if value is Ellipsis:
        return "..."
    raise Unspellable(f"no literal of a {type(value).__name__}")


def _spell_tensor(t: Tensor) -> str:
    if hasattr(t, "spelled"):
        return t.spelled
    if t.layout is not torch.strided:
        raise Unspellable(f"no literal of a tensor of layout {t.layout}")
    if t.numel() == 0:
        literal = f"torch.empty({list(t.shape)}, dtype={t.dtype}"
    else:
        literal = f"torch.tensor({_spell(t.detach().tolist())}, dtype={t.dtype}"
    return literal + (", requires_grad=True)" if t.requires_grad else ")")
