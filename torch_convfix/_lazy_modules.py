"""Lazy modules that stay lazy when they are moved to another kind of device before their first call.

``nn.Module._apply`` gives such a move new parameters, plain ones of no elements, which the first call
then takes for initialized.
"""

from collections.abc import Callable
from typing import Any

from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy


def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
    kinds: list[tuple[dict[str, Any], Any]] = [
        (self._parameters, UninitializedParameter),
        (self._buffers, UninitializedBuffer),
    ]
    kept = [
        (values, name, value, kind)
        for values, kind in kinds
        for name, value in values.items()
        if value is not None and is_lazy(value)
    ]
    super(LazyModuleMixin, self)._apply(fn, recurse)
    for values, name, before, kind in kept:
        if not is_lazy(values[name]):
            moved = values[name]
            values[name] = kind(
                requires_grad=before.requires_grad, device=moved.device, dtype=moved.dtype
            )
    return self


def mend() -> None:
    """Teach every lazy module so. Idempotent."""
    LazyModuleMixin._apply = _apply  # type: ignore[attr-defined]
