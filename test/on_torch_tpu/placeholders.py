"""Run a step on TorchTPU's own kernels, traced on placeholders: the numbers come from XLA:CPU."""

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_convfix.tpu._jax import execute
from torch_convfix.tpu.torch_tpu import trace


def on_tpu(fn: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> list[Tensor]:
    return execute(trace(fn, inputs), inputs)
