"""Where a call runs: a device of this process, torch_xla's, or a TPU that TorchTPU only traces."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_convfix import _devices
from torch_convfix.tpu import _environment

Body = Callable[[Sequence[Tensor]], list[Tensor]]


class Device:
    """A device that PyTorch runs on as it goes."""

    traced = False

    def __init__(self, name: str):
        self.name = name

    def run(self, body: Body, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``body`` of copies of ``tensors`` on the device; its results, on the CPU."""
        outputs = body([_copy(t, torch.device(self.name)) for t in tensors])
        return [t.cpu() for t in outputs]

    def default_dtype(self) -> torch.dtype:
        """The one in which a difference says the most about the device."""
        return torch.float32


class _XLA(Device):
    def run(self, body: Body, tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch_xla

        outputs = body([_copy(t, torch_xla.device()) for t in tensors])
        torch_xla.sync()  # once, with all results alive: see `graph_hash_fault`
        return [t.cpu() for t in outputs]

    def default_dtype(self) -> torch.dtype:
        from torch_xla import runtime

        return torch.float64 if runtime.device_type() == "CPU" else torch.float32


class _TracedTPU(Device):
    """TorchTPU's kernels and autograd, traced on placeholders and run by XLA:CPU."""

    traced = True

    def run(self, body: Body, tensors: Sequence[Tensor]) -> list[Tensor]:
        from torch_convfix.tpu import torch_tpu
        from torch_convfix.tpu._jax import execute

        return execute(torch_tpu.trace(lambda *given: body(given), tensors), tensors)

    def default_dtype(self) -> torch.dtype:
        return torch.float64


def _copy(t: Tensor, device: torch.device) -> Tensor:
    return t.detach().clone().to(device).requires_grad_(t.requires_grad)


def get_device(name: str) -> Device:
    """The device by its PyTorch name; ``tpu`` is traced where there is no TPU."""
    # Before the first backward: the autograd engine counts the devices once.
    if name == "xla":
        importlib.import_module("torch_xla").device()
        return _XLA(name)
    if name == "tpu":
        _environment.prepare()
        importlib.import_module("torch_tpu")
        if not torch.accelerator.is_available():
            importlib.import_module("torch_convfix.tpu.torch_tpu")
            return _TracedTPU(name)
    return Device(name)


@contextlib.contextmanager
def kernels(name: str, *, stock: bool) -> Iterator[None]:
    """A context with the device's own kernels, or with ours."""
    with _devices.disabled(name) if stock else _devices.enabled(name):
        yield


def graph_hash_fault() -> bool:
    """Whether torch_xla runs one graph's program for another (upstream/torch_xla/graph_hash.md)."""
    import torch_xla

    x, y = (torch.tensor([v], device=torch_xla.device()) for v in (2.0, 5.0))
    torch_xla.sync()
    first, second = torch.cat([x, x, y]).cpu(), torch.cat([x, y, y]).cpu()
    return bool(first[1] == second[1])
