"""Trace TorchTPU's own kernels and autograd on placeholders: no TPU is needed.

Uses private names of torch_tpu 0.2.0. Known limits: integer tensors that the function makes from
constants may be traced wrongly (pass them as inputs); cumsum's backward ends the process.
"""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor

from torch_convfix.tpu import _environment, _origin

_environment.prepare()

import torch
import torch_tpu  # noqa: F401
from torch_tpu._internal import execution_mode
from torch_tpu._internal.compile import tpu_torch_compile

from torch_convfix import _one_device

_one_device.install()
torch.utils.rename_privateuse1_backend("tpu")


def _trace(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor], locations: bool
) -> tuple[str, dict[str, _origin.Origin]]:
    mode = execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH
    with execution_mode.set_eager_mode(mode):
        placeholders = [
            tpu_torch_compile.placeholder(list(t.shape), t.dtype, t.requires_grad) for t in inputs
        ]
        # Copies, which cost nothing in StableHLO: a placeholder that `fn` writes to is none any more.
        given = [p.detach().clone().requires_grad_(p.requires_grad) for p in placeholders]
        origins: dict[str, _origin.Origin] = {}
        if locations:
            with _origin.labelled(_label) as origins:
                outputs = fn(*given)
        else:
            outputs = fn(*given)
        present = [t for t in outputs if isinstance(t, Tensor)]
        module = tpu_torch_compile.build_mlir(present, placeholders)
        text = tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=locations)
        return text, origins


def trace(fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> str:
    """StableHLO of ``fn(*inputs)``, a sequence of tensors.

    ``fn`` gets placeholders on the device ``tpu`` with the shapes, dtypes and ``requires_grad`` of
    ``inputs``.
    """
    return _trace(fn, inputs, locations=False)[0]


def trace_with_origins(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]
) -> tuple[str, dict[str, _origin.Origin]]:
    """As `trace` with locations, and the origins that they name as files."""
    return _trace(fn, inputs, locations=True)


def _run(call: Callable[[], Any]) -> Any:
    return call()


@functools.cache
def _label_function(name: str) -> FunctionType:
    return FunctionType(_run.__code__.replace(co_filename=name), {})


def _label(name: str, call: Callable[[], Any]) -> Any:
    # TorchTPU notes the Python frames that an operator is called from.
    return _label_function(name)(call)
