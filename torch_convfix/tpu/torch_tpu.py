"""Trace TorchTPU's own kernels and autograd on placeholders: no TPU is needed.

Uses private names of torch_tpu 0.2.0. Known limits: integer tensors that the function makes from
constants may be traced wrongly (pass them as inputs); cumsum's backward ends the process.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_convfix.tpu import _environment

_environment.prepare()

import torch  # noqa: E402
import torch_tpu  # noqa: E402, F401
from torch_tpu._internal import execution_mode  # noqa: E402
from torch_tpu._internal.compile import tpu_torch_compile  # noqa: E402

from torch_convfix.tpu import _one_device  # noqa: E402

_one_device.install()
torch.utils.rename_privateuse1_backend("tpu")


def trace(fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> str:
    """StableHLO of ``fn(*inputs)``, a sequence of tensors.

    ``fn`` gets placeholders on the device ``tpu`` with the shapes, dtypes and ``requires_grad`` of
    ``inputs``.
    """
    mode = execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH
    with execution_mode.set_eager_mode(mode):
        placeholders = [
            tpu_torch_compile.placeholder(list(t.shape), t.dtype, t.requires_grad) for t in inputs
        ]
        module = tpu_torch_compile.build_mlir(list(fn(*placeholders)), placeholders)
        return tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=False)
