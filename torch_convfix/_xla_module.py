"""``torch.xla``, the device module that torch_xla lacks and ``torch.utils.checkpoint`` asks for."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_initialized = True  # else checkpoint leaves the generator's state alone


def _xla() -> Any:
    return importlib.import_module("torch_xla")._XLAC


def _name(device: int | str | torch.device | None) -> str:
    if device is None:
        return str(_xla()._xla_get_default_device())
    return f"xla:{device}" if isinstance(device, int) else str(torch.device(device))


def is_available() -> bool:
    """Whether there is an XLA device."""
    return device_count() > 0


def device_count() -> int:
    """The number of XLA devices of this process."""
    return len(_xla()._xla_get_devices())


def current_device() -> int:
    """The index of the default XLA device."""
    return torch.device(_name(None)).index or 0


@contextlib.contextmanager
def device(index: int | str | torch.device) -> Iterator[None]:
    """A context in which the XLA device is the default one."""
    before = _name(None)
    _xla()._xla_set_default_device(_name(index))
    try:
        yield
    finally:
        _xla()._xla_set_default_device(before)


def get_rng_state(device: int | str | torch.device | None = None) -> Tensor:
    """The state of a device's generator, its seed of 64 bits, as 8 bytes on the CPU."""
    seed = _xla()._xla_get_rng_seed(_name(device)) % 2**64
    return torch.tensor(list(seed.to_bytes(8, "little")), dtype=torch.uint8, device="cpu")


def set_rng_state(new_state: Tensor, device: int | str | torch.device | None = None) -> None:
    """Put a device's generator back to what `get_rng_state` returned.

    Raises:
        ValueError: if ``new_state`` is not a tensor of 8 bytes.
    """
    if new_state.shape != (8,) or new_state.dtype != torch.uint8:
        raise ValueError(
            "new_state must be a uint8 tensor of shape [8], got "
            f"{new_state.dtype} of shape {list(new_state.shape)}"
        )
    seed = int.from_bytes(bytes(new_state.tolist()), "little")
    _xla()._xla_set_rng_seed(seed, _name(device))


def register() -> None:
    """Make this module ``torch.xla``, unless there is one."""
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", sys.modules[__name__])
