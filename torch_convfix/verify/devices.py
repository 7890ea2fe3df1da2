"""Where a call runs: a device of this process, torch_xla's, or a TPU that TorchTPU only traces."""

import contextlib
import importlib
import warnings
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
    """Whether torch_xla returns wrong numbers for tensors of one step read one by one.

    Two graphs that differ only in which inner node they share then have one hash, and the second
    runs the program of the first.
    """
    import torch_xla

    def second_gradients(device: torch.device) -> list[Tensor]:
        x, y = (torch.arange(1.0, 4.0, device=device).mul(s).requires_grad_() for s in (0.3, 0.7))
        first = torch.autograd.grad(torch.sin(x * y).sum(), [x, y], create_graph=True)
        if device.type == "xla":
            torch_xla.sync()
        penalty = sum((g * g).sum() for g in first)
        assert isinstance(penalty, Tensor)
        return list(torch.autograd.grad(penalty, [x, y]))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = [t.cpu() for t in second_gradients(torch_xla.device())]
    want = second_gradients(torch.device("cpu"))
    return not all(torch.allclose(g, w, rtol=1e-3) for g, w in zip(got, want, strict=True))
