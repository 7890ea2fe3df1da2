"""What libtpu and jax must find in the environment on a machine with no TPU."""

import os

_DEFAULTS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise one process at a time, by a lock file
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "1",  # int64 labels stay int64
}


# With these in the environment before torch_xla is imported, operators know where they come from.
TORCH_XLA_DEBUG = {"XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1"}


def prepare() -> None:
    """Set what is not set. Call before jax, torch_tpu or libtpu is imported."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
