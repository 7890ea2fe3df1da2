"""Compile and execute StableHLO for XLA:CPU through jax."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_convfix.tpu import _environment


def compile(stablehlo: str) -> Any:
    """jaxlib's executable of the module for XLA:CPU."""
    _environment.prepare()
    import jax
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    device = jax.devices("cpu")[0]
    with jax_mlir.make_ir_context():
        return device.client.compile_and_load(
            ir.Module.parse(stablehlo),
            xla_client.DeviceList((device,)),
            xla_client.CompileOptions(),
        )


def flops(stablehlo: str) -> float:
    """XLA's cost analysis of the module, compiled for XLA:CPU."""
    analysis = compile(stablehlo).cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


def execute(stablehlo: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The module's results on XLA:CPU, for CPU tensors in the order of its parameters."""
    executable = compile(stablehlo)
    import jax
    import numpy as np

    device = jax.devices("cpu")[0]
    buffers = [jax.device_put(t.detach().numpy(), device) for t in inputs]
    arrays = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [torch.from_numpy(np.array(a[0])) for a in arrays]


def text_of_portable(artifact: bytes) -> str:
    """StableHLO text, with locations, of StableHLO's portable bytecode."""
    _environment.prepare()
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client

    with jax_mlir.make_ir_context():
        module = xla_client._xla.mlir.deserialize_portable_artifact(artifact)
        return module.operation.get_asm(enable_debug_info=True)
