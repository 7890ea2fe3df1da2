"""Trace a step through torch_xla."""

from collections.abc import Callable, Sequence
from typing import Any

import _XLAC
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor

from torch_convfix.tpu import _jax, _origin


def _outputs(fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> list[Tensor]:
    device = torch_xla.device()
    copies = [t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs]
    return [t for t in fn(*copies) if isinstance(t, Tensor)]


def trace(fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> str:
    """StableHLO of ``fn(*inputs)``, a sequence of tensors; nothing is run.

    ``fn`` gets copies of ``inputs`` on the XLA device.
    """
    return stablehlo(_outputs(fn, inputs))


def stablehlo(outputs: list[Tensor]) -> str:
    """StableHLO of lazy tensors; nothing is run."""
    # Not torch_xla's own text: boolean constants and debug locations are in no parser's StableHLO there.
    bytecode = xm.get_stablehlo_bytecode(outputs)  # type: ignore[arg-type]  # a list, says its docstring
    return _jax.text_of_portable(bytecode)


def _label(name: str, call: Callable[[], Any]) -> Any:
    scope = _XLAC.profiler.scope_pusher(name)
    try:
        return call()
    finally:
        del scope


def trace_with_origins(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]
) -> tuple[str, dict[str, _origin.Origin]]:
    """As `trace`, and the origins that the operators' names begin with where `TORCH_XLA_DEBUG` is set."""
    with _origin.labelled(_label) as origins:
        outputs = _outputs(fn, inputs)
    return stablehlo(outputs), origins
