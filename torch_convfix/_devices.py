"""Which device has our kernels: enable, disable, status."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar

from torch_convfix import _C, _lazy_modules, _xla_module

OutputPadding = Literal["native", "pad"]
Hardware = Literal["cpu", "tpu", "other"]
Grouped = Literal["direct", "merge"]
Convolution = Literal["native", "composed"]

_GRAPH_HASH = "LazyGraphExecutor::RunPostOrder"  # the mend's row among the registrations
_MOST_SHAPES = 10  # to print

_E = TypeVar("_E", bound=Enum)

_STACKS = {"xla": "torch_xla", "tpu": "torch_tpu"}


def _choice(name: str, value: str, enum: type[_E]) -> _E:
    if not isinstance(value, str) or value not in enum.__members__:
        raise ValueError(f"{name} must be one of {', '.join(enum.__members__)}, got {value!r}")
    return enum.__members__[value]


def _check_device(device: str) -> None:
    if not isinstance(device, str):
        raise TypeError(f"device must be a string, as 'xla' or 'cpu', got {device!r}")


def _check_bool(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def is_installed(module: str) -> bool:
    """Whether a stack's module can be imported."""
    return importlib.util.find_spec(module) is not None


def default_device() -> str:
    """The installed stack's device; torch_xla's where both are."""
    for device, module in _STACKS.items():
        if is_installed(module):
            return device
    raise ImportError("neither torch_xla nor torch_tpu is installed: name a device, as cpu")


def _import_stack(device: str) -> None:
    # A backend's own registrations must come before ours: a later one wins.
    module = _STACKS.get(device)
    if module is None:
        return
    if not is_installed(module):
        raise ValueError(f"device {device!r} needs {module}, which is not installed")
    importlib.import_module(module)
    if device == "xla":
        _xla_module.register()
        _lazy_modules.mend()


def _hardware(device: str) -> Hardware:
    if device != "xla":
        return "other"
    kind = importlib.import_module("torch_xla.runtime").device_type().lower()
    return kind if kind in ("cpu", "tpu") else "other"


def enable(
    device: str = "xla",
    output_padding: OutputPadding = "native",
    hardware: Hardware | None = None,
    *,
    derivatives: bool = True,
    grouped: Grouped | None = None,
    dynamic: bool | None = None,
    convolution: Convolution = "native",
) -> None:
    """Put our kernels in place of the device's own. Idempotent; new options replace the old.

    Args:
        device: ``"xla"`` (torch_xla), ``"tpu"`` (TorchTPU), ``"cpu"``, ``"cuda"``, or the name of the
            PrivateUse1 backend. Every device gets the double backward of convolutions; ``xla`` gets
            the convolutions as well; ``xla`` and ``tpu`` get the derivatives that they need mended;
            every device gets the second derivatives that PyTorch lacks (hardsigmoid, cdist, ...).
        output_padding: who enlarges a transposed convolution's input on ``xla``: ``"native"``, the
            device's own kernel, or ``"pad"``, ours, for a kernel that does not know of it.
        hardware: what the graph will run on, ``"cpu"``, ``"tpu"`` or ``"other"``. By default what
            torch_xla runs on. Give it to trace on one machine what another will run.
        derivatives: also mend other operators whose derivatives the device gets wrong, and give
            those that PyTorch lacks.
        grouped: ``"merge"`` computes neighbouring groups of a convolution on ``xla`` as one, with
            zeros between them, where the TPU compiler's estimate is lower for it. A NaN or Inf in
            one group then makes NaN of the others of its merge, so the default is ``"direct"``, or
            the environment's ``TORCH_CONVFIX_GROUPED``.
        dynamic: also mend what stands in a conv net's way on ``xla`` tensors with bounded-dynamic
            sizes. By default where the environment's ``XLA_EXPERIMENTAL`` lets torch_xla make such.
        convolution: ``"composed"`` registers convolutions made of operators that any backend has
            (padding, slices, batched matrix products, sums), with all their gradients: for a
            PrivateUse1 backend that has none of its own. Also for ``cpu``, ``cuda`` and ``xla``, to
            try it. ``"native"`` leaves the device's own.

    Raises:
        TypeError: for a device that is not a string, or a switch that is not a bool.
        ValueError: for an unknown device, one whose stack is not installed, or an unknown option.
    """
    _check_device(device)
    _check_bool("derivatives", derivatives)
    padding = _choice("output_padding", output_padding, _C.OutputPadding)
    _import_stack(device)
    chosen = _choice("hardware", hardware or _hardware(device), _C.Hardware)
    asked = os.environ.get("TORCH_CONVFIX_GROUPED")
    if grouped == "merge" and device != "xla":
        raise ValueError(f"grouped='merge' is of the device xla, got the device {device!r}")
    source = "the environment's TORCH_CONVFIX_GROUPED" if asked and not grouped else "grouped"
    merging = _choice(source, grouped or asked or "direct", _C.Grouped)
    if dynamic is None:
        dynamic = device == "xla" and bool(os.environ.get("XLA_EXPERIMENTAL"))
    _check_bool("dynamic", dynamic)
    convolutions = _choice("convolution", convolution, _C.Convolutions)
    if convolution == "composed" and device == "tpu":
        raise ValueError("convolution='composed' is not of the device 'tpu', which has its own")
    options = _C.Options(
        padding, chosen, derivatives, merging, dynamic=dynamic, convolutions=convolutions
    )
    _C.enable(device, options)
    if device == "xla" and not any(r[1] == _GRAPH_HASH for r in _C.registrations()):
        warnings.warn(
            "this torch_xla's graph hash could not be mended: it may run one graph's program for "
            "another. Call torch_xla.sync() once, with all results alive, before reading any",
            stacklevel=2,
        )


def disable(device: str = "xla") -> None:
    """Give the device its own kernels back. Idempotent."""
    _check_device(device)
    _C.disable(device)


def is_enabled(device: str = "xla") -> bool:
    """Whether the device has our kernels."""
    _check_device(device)
    return _C.enabled_options(device) is not None


@contextlib.contextmanager
def _restored(device: str) -> Iterator[None]:
    _check_device(device)
    before = _C.enabled_options(device)
    try:
        yield
    finally:
        if before is None:
            _C.disable(device)
        else:
            _C.enable(device, before)


@contextlib.contextmanager
def enabled(
    device: str = "xla",
    output_padding: OutputPadding = "native",
    hardware: Hardware | None = None,
    *,
    derivatives: bool = True,
    grouped: Grouped | None = None,
    dynamic: bool | None = None,
    convolution: Convolution = "native",
) -> Iterator[None]:
    """A context with our kernels; what was before is there again after. Arguments as `enable`."""
    with _restored(device):
        enable(
            device,
            output_padding,
            hardware,
            derivatives=derivatives,
            grouped=grouped,
            dynamic=dynamic,
            convolution=convolution,
        )
        yield


@contextlib.contextmanager
def disabled(device: str = "xla") -> Iterator[None]:
    """A context with the device's own kernels; what was before is there again after."""
    with _restored(device):
        disable(device)
        yield


def enable_installed() -> None:
    """Enable every TPU stack that is installed, unless ``TORCH_CONVFIX=0``."""
    if os.environ.get("TORCH_CONVFIX") == "0":
        return
    for device, module in _STACKS.items():
        if is_installed(module):
            enable(device)


@dataclass(frozen=True)
class Registration:
    """One kernel of ours, as the dispatcher has it."""

    device: str
    operator: str
    dispatch_key: str
    purpose: str


@dataclass(frozen=True)
class Compilation:
    """What torch_xla has compiled in this process, by its own metrics. `print` it.

    ``shapes``: the input shapes of the convolutions traced so far by ours, each with how often; -1 is
    a size not known at tracing. Every new shape is a new graph.
    """

    graphs: int
    seconds: float
    reused: int
    shapes: dict[tuple[int, ...], int]

    def __str__(self) -> str:
        lines = [
            f"torch_xla: {self.graphs} graphs compiled in {self.seconds:.1f} s, "
            f"{self.reused} runs of one compiled before"
        ]
        often = sorted(self.shapes.items(), key=lambda item: -item[1])
        for shape, times in often[:_MOST_SHAPES]:
            sizes = ", ".join("?" if s < 0 else str(s) for s in shape)
            lines.append(f"  convolution of [{sizes}], traced {times} times")
        if len(often) > _MOST_SHAPES:
            lines.append(f"  and {len(often) - _MOST_SHAPES} other shapes")
        return "\n".join(lines)


def _compilation() -> Compilation | None:
    if "torch_xla" not in sys.modules:
        return None
    metrics = importlib.import_module("torch_xla.debug.metrics")
    _, nanoseconds, _ = metrics.metric_data("CompileTime") or (0, 0.0, [])
    return Compilation(
        metrics.counter_value("UncachedCompile") or 0,
        nanoseconds / 1e9,
        metrics.counter_value("CachedCompile") or 0,
        {tuple(shape): times for shape, times in _C.traced_shapes()},
    )


@dataclass(frozen=True)
class Status:
    """What is registered, with which options and versions, and what was compiled. `print` it."""

    versions: dict[str, str]
    options: dict[str, dict[str, object]]
    registrations: list[Registration]
    compilation: Compilation | None  # None where torch_xla is not loaded

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for column in ("device", "operator", "dispatch key", "what ours does, or mends"):
            table.add_column(column)
        for r in self.registrations:
            table.add_row(r.device, r.operator, r.dispatch_key, r.purpose)
        console = Console(width=130, color_system=None)
        with console.capture() as capture:
            console.print(", ".join(f"{name} {v}" for name, v in self.versions.items()))
            if self.registrations:
                console.print(table)
            for device, options in self.options.items():
                text = ", ".join(f"{name} {value}" for name, value in options.items())
                console.print(f"{device}: {text}")
            if not self.options:
                console.print("no device is enabled")
            if self.compilation is not None:
                console.print(str(self.compilation), markup=False)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def status() -> Status:
    """What is registered, by whom, and which versions are here."""
    versions = {}
    for package in ("torch-convfix", "torch", "torch_xla", "torch_tpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    registrations = [Registration(*fields) for fields in _C.registrations()]
    options: dict[str, dict[str, object]] = {}
    for device in sorted({r.device for r in registrations} - {"meta"}):
        chosen = _C.enabled_options(device)
        if chosen is not None:  # disabled meanwhile by another thread
            options[device] = {
                "output_padding": chosen.output_padding.name,
                "hardware": chosen.hardware.name,
                "grouped": chosen.grouped.name,
                "derivatives": chosen.derivatives,
                "dynamic": chosen.dynamic,
                "convolution": chosen.convolutions.name,
            }
    return Status(versions, options, registrations, _compilation())
