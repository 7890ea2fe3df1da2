"""Right and lean derivatives of convolutions, of every order, for PyTorch on XLA and elsewhere.

``import torch_convfix`` before training is all: it enables every TPU stack that is installed
(torch_xla as ``"xla"``, TorchTPU as ``"tpu"``). ``TORCH_CONVFIX=0`` in the environment imports
without enabling.
"""

from torch_convfix import _torch_version as _torch_version  # first: refuses a foreign torch
from torch_convfix import functional as functional
from torch_convfix._devices import (
    Registration,
    Status,
    disable,
    disabled,
    enable,
    enable_installed,
    enabled,
    is_enabled,
    status,
)

__version__ = "0.1.0"
__all__ = [
    "Registration",
    "Status",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "functional",
    "is_enabled",
    "status",
]

enable_installed()
del enable_installed
