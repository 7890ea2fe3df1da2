"""Compare a whole model or loss on a device with float64 on the CPU, and name the call to blame."""

import copy
import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from torch_convfix.verify.compare import Outcome, compare
from torch_convfix.verify.derivatives import (
    VALUE,
    Call,
    Program,
    evaluate,
    order_stage,
    random_like,
)
from torch_convfix.verify.devices import Device, get_device, kernels
from torch_convfix.verify.report import error_text

# Not calls of the forward: they differentiate, or change what is differentiated.
_SKIPPED = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.backward,
    torch.Tensor.detach,
    torch.Tensor.requires_grad_,
}


@dataclass
class Blame:
    """A call that, alone and with the inputs that it had, is wrong."""

    name: str
    where: str  # file:line of the caller
    shapes: list[tuple[int, ...]]
    outcome: Outcome

    def __str__(self) -> str:
        shapes = ", ".join(str(list(s)) for s in self.shapes)
        parts = [f"{s} by {error_text(self.outcome.errors[s])}" for s in self.outcome.wrong]
        parts += [f"{s} raises {line}" for s, line in self.outcome.raised.items()]
        return f"{self.name}({shapes}) at {self.where}: {', '.join(parts)}"


@dataclass
class AuditReport:
    """The result of `audit`. `print` it; `ok` says whether device and CPU agree."""

    device: str
    outcome: Outcome
    calls: int = 0
    blamed: list[Blame] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every order that was asked for agrees."""
        return not (self.outcome.wrong or self.outcome.raised or self.blamed)

    def __str__(self) -> str:
        lines = []
        for stage, error in self.outcome.errors.items():
            verdict = f"WRONG by {error_text(error)}" if stage in self.outcome.wrong else "right"
            lines.append(f"{stage}: {verdict}")
        lines += [f"{stage}: raises {line}" for stage, line in self.outcome.raised.items()]
        lines += [
            f"{stage}: the CPU refuses: {line}" for stage, line in self.outcome.refused.items()
        ]
        if self.outcome.skipped:
            lines.append(f"not compared: {self.outcome.skipped}")
        lines += [f"to blame: {blame}" for blame in self.blamed]
        if not self.ok and not self.blamed:
            lines.append(f"none of its {self.calls} calls is wrong alone")
        return "\n".join(lines)


def audit(
    fn: Callable[..., Any],
    *inputs: Any,
    device: str = "xla",
    order: int = 2,
    stock: bool = False,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
) -> AuditReport:
    """Compare value and derivatives of ``fn(*inputs)`` on a device with float64 on the CPU.

    Args:
        fn: a module, or a function of tensors and modules. All that it computes with must come in by
            ``inputs``: what it closes over stays where it is.
        inputs: on the CPU. The parameters of modules are differentiated, and the tensors that require
            a gradient.
        device: as in `torch_convfix.verify.run`.
        order: the highest order of derivatives.
        stock: run with the device's own kernels in place of ours.
        dtype: on the device; by default as in `torch_convfix.verify.run`.
        tolerance: relative error from which a result is wrong; by default by ``dtype``.

    Returns:
        A report. Where they disagree, each torch function call of the forward is replayed alone with
        the inputs that it had, and those that are wrong alone are named. A custom
        `torch.autograd.Function` is also compared with the finite differences of its own forward.
    """
    where = get_device(device)
    dtype = dtype or where.default_dtype()
    function, tensors = _as_function(fn, inputs)
    stages = [order_stage(i) for i in range(order + 1)]
    with kernels(device, stock=stock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = _Recorder()
        in_float64 = pytree.tree_map_only(Tensor, _double, tensors)
        with recorder, mock.patch.object(torch.autograd.Function, "apply", recorder.apply):
            function(in_float64)
        outcome = compare(Call(function, (tensors,)), where, stages, dtype, tolerance, size=0.0)
        report = AuditReport(device, outcome, len(recorder.calls))
        inner = recorder.differentiates
        replayed = [order_stage(i) for i in range(order + inner + 1)]
        for call in recorder.calls:
            blame = _blame(call, where, replayed, dtype, tolerance, everything=not report.ok)
            if blame and str(blame) not in map(str, report.blamed):
                report.blamed.append(blame)
    return report


def _as_function(
    fn: Callable[..., Any], inputs: tuple[Any, ...]
) -> tuple[Callable[[Any], Any], Any]:
    """``fn`` as a function of tensors alone: a module becomes its parameters and buffers."""
    parts = [fn, *inputs]
    states = [
        dict([*part.named_parameters(), *part.named_buffers()])
        if isinstance(part, nn.Module)
        else part
        for part in parts[1:]
    ]
    own = dict([*fn.named_parameters(), *fn.named_buffers()]) if isinstance(fn, nn.Module) else {}

    def function(tensors: Any) -> Any:
        own, states = tensors
        given = [
            _bind(part, state) if isinstance(part, nn.Module) else state
            for part, state in zip(parts[1:], states, strict=True)
        ]
        return (_bind(fn, own) if isinstance(fn, nn.Module) else fn)(*given)

    return function, (own, states)


def _bind(module: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """A copy of the module whose parameters and buffers are these tensors, differentiably."""
    bound = copy.copy(module)
    bound._parameters, bound._buffers = {}, {}
    bound._modules = dict(module._modules)
    for name, child in module._modules.items():
        if child is not None:
            prefix = f"{name}."
            own = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
            bound._modules[name] = _bind(child, own)
    for name in module._parameters:
        object.__setattr__(bound, name, state.get(name))
    for name in module._buffers:
        object.__setattr__(bound, name, state.get(name))

    def parameters(recurse: bool = True) -> Iterator[Tensor]:
        return (t for k, t in state.items() if k in dict(module.named_parameters()))

    object.__setattr__(bound, "parameters", parameters)
    return bound


@dataclass
class _Recorded:
    name: str
    where: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    custom: bool = False


class _Recorder(TorchFunctionMode):
    """Keeps each call of the forward, with copies of the inputs that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Recorded] = []
        self.differentiates = 0  # how deep: the orders that the function takes itself
        self._apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
        recorder = self

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():  # what it does inside is not the forward's own
                kept = pytree.tree_map_only(Tensor, _keep, (args, kwargs))
                result = recorder._apply(cls, *args, **kwargs)
            replay = functools.partial(recorder._apply, cls)
            recorder._add(cls.__name__, replay, kept, result, custom=True)
            return result

        self.apply: classmethod[Any, ..., Any] = classmethod(apply)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SKIPPED:
            self.differentiates += func is torch.autograd.grad
            return func(*args, **kwargs)
        kept = pytree.tree_map_only(Tensor, _keep, (args, kwargs))
        result = func(*args, **kwargs)
        self._add(resolve_name(func) or func.__name__, func, kept, result)
        return result

    def _add(
        self,
        name: str,
        fn: Any,
        kept: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
        custom: bool = False,
    ) -> None:
        floating = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.is_floating_point() for t in floating) and not name.endswith("__get__"):
            self.calls.append(_Recorded(name, _caller(), fn, *kept, custom=custom))


def _keep(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad and t.is_floating_point())


def _caller() -> str:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        inside = ("/torch/", "/torch_convfix/", "/unittest/")
        if not any(part in frame.filename for part in inside):
            return f"{frame.filename}:{frame.lineno}"
    return "?"


def _double(t: Tensor) -> Tensor:
    dtype = torch.float64 if t.is_floating_point() else t.dtype
    return t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)


def _blame(
    call: _Recorded,
    device: Device,
    stages: Sequence[str],
    dtype: torch.dtype,
    tolerance: float | None,
    *,
    everything: bool,
) -> Blame | None:
    outcome = Outcome()
    if everything:
        outcome = compare(
            Call(call.fn, call.args, call.kwargs), device, stages, dtype, tolerance, size=0.0
        )
    if call.custom and not outcome.wrong:
        outcome = _against_differences(call)
    if not (outcome.wrong or outcome.raised):
        return None
    tensors = [t for t in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
    return Blame(call.name, call.where, [tuple(t.shape) for t in tensors], outcome)


_STEP = 1e-5  # of central differences in float64
_DIFFERENCE_TOLERANCE = 1e-3


def _against_differences(call: _Recorded) -> Outcome:
    """A custom Function's gradient on the CPU against central differences of its own value."""
    program = Program(call.fn, call.args, call.kwargs)
    tensors = program.tensors
    moved = [i for i, t in enumerate(tensors) if t.requires_grad]
    cotangents: dict[str, Tensor] = {}

    def draw(name: str, like: Tensor) -> Tensor:
        return cotangents.setdefault(name, random_like(len(cotangents), like))

    result = evaluate(program, tensors, [order_stage(1)], draw)
    gradients = result.get(order_stage(1))
    if not moved or not isinstance(gradients, dict):
        return Outcome()
    directions = {i: random_like(100 + i, tensors[i]) for i in moved}
    got = sum((gradients[f"input {i}"] * directions[i]).sum() for i in moved)

    def value(step: float) -> Tensor | float:
        at = [
            t.detach() + step * directions[i] if i in directions else t
            for i, t in enumerate(tensors)
        ]
        outputs = evaluate(program, at, [VALUE], draw)[VALUE]
        assert isinstance(outputs, dict)
        return sum(
            (y * cotangents[f"{name} at order 1"]).sum()
            for name, y in outputs.items()
            if f"{name} at order 1" in cotangents
        )

    steps = [(value(h) - value(-h)) / (2 * h) for h in (_STEP, _STEP / 4)]
    size = max(abs(float(s)) for s in (*steps, got)) or 1.0
    if abs(float(steps[0] - steps[1])) > _DIFFERENCE_TOLERANCE * size:
        return Outcome()  # not smooth here: the differences say nothing
    error = abs(float(got - steps[1])) / size
    if error <= _DIFFERENCE_TOLERANCE:
        return Outcome()
    stage = "gradient against finite differences, on the CPU too"
    return Outcome(errors={stage: error}, wrong={stage: "along a random direction"})
