"""Trace a step through torch_xla."""

from collections.abc import Callable, Sequence
from typing import Any

import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor


def trace(fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]) -> str:
    """StableHLO of ``fn(*inputs)``, a sequence of tensors; nothing is run.

    ``fn`` gets copies of ``inputs`` on the XLA device.
    """
    device = torch_xla.device()
    copies = [t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs]
    return xm.get_stablehlo([t for t in fn(*copies) if isinstance(t, Tensor)])
