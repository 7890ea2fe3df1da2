"""Right and lean derivatives of convolutions, of every order, for PyTorch on XLA and elsewhere.

``import torch_convfix`` before training is all: it enables every TPU stack that is installed
(torch_xla as ``"xla"``, TorchTPU as ``"tpu"``). ``TORCH_CONVFIX=0`` in the environment imports
without enabling.
"""

import importlib
from typing import Any

from torch_convfix._torch_version import extension_folder

__path__.append(extension_folder())  # first: or refuses a foreign torch

from torch_convfix import functional as functional
from torch_convfix import nn as nn
from torch_convfix import reference as reference
from torch_convfix._checkpoint import checkpoint
from torch_convfix._devices import (
    Compilation,
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
from torch_convfix.masked.receptive_field import leaks, plot_receptive_field, receptive_field

__version__ = "0.2.0"
__all__ = [
    "Compilation",
    "Registration",
    "Status",
    "audit",
    "checkpoint",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "functional",
    "is_enabled",
    "leaks",
    "nn",
    "plot_receptive_field",
    "receptive_field",
    "reference",
    "status",
    "tpu",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Tools, and what they import, only when they are asked for.
    if name == "audit":
        return importlib.import_module("torch_convfix.verify.audit").audit
    if name in ("tpu", "verify"):
        return importlib.import_module(f"torch_convfix.{name}")
    raise AttributeError(f"module 'torch_convfix' has no attribute {name!r}")


enable_installed()
del enable_installed
