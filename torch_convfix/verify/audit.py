"""Compare a whole model or loss on a device with float64 on the CPU, and name the call to blame."""

import contextlib
import functools
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from torch_convfix._target import as_function
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
    stages: list[str]  # that were asked for
    calls: int = 0
    blamed: list[Blame] = field(default_factory=list)
    outside: int = 0  # tensors that it differentiates and that are not among the inputs

    @property
    def ok(self) -> bool:
        """Whether something was compared, nothing was left out, and all agrees."""
        wrong = self.outcome.wrong or self.outcome.raised or self.blamed
        return bool(self.outcome.errors) and not (wrong or self.outside)

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
        elif not self.outcome.raised:
            left = [
                s for s in self.stages if s not in {**self.outcome.errors, **self.outcome.refused}
            ]
            lines += [f"{s}: nothing to compare, no input can be differentiated" for s in left]
        if self.outside:
            lines.append(
                f"not compared: derivatives by {self.outside} tensors that require a gradient and are "
                "not among the inputs"
            )
        lines += [f"to blame: {blame}" for blame in self.blamed]
        if (self.outcome.wrong or self.outcome.raised) and not self.blamed:
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
        fn: a module, or a function of tensors and modules, that returns tensors. All that it computes
            with must come in by ``inputs``: what it closes over stays where it is. It is given copies:
            gradients come from `torch.autograd.grad`, not from ``.grad``.
        inputs: on the CPU, tensors, modules, and lists and dictionaries of them. The parameters of
            modules are differentiated, and the tensors that require a gradient; where nothing does,
            all floating-point tensors are.
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
    function, tensors = as_function(fn, inputs)
    tensors = _differentiated(tensors)
    stages = [order_stage(i) for i in range(order + 1)]
    with kernels(device, stock=stock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = _Recorder()
        in_float64 = pytree.tree_map_only(Tensor, _double, tensors)
        copies = pytree.tree_map_only(Tensor, Tensor.clone, in_float64)
        outside = 0
        with (
            contextlib.suppress(Exception),  # `compare` meets it again, and says so
            recorder,
            mock.patch.object(torch.autograd.Function, "apply", recorder.apply),
        ):
            outside = _outside(function(copies), in_float64)
        outcome = compare(Call(function, (tensors,)), where, stages, dtype, tolerance, size=0.0)
        if any("device_ready_queues_" in line for line in outcome.raised.values()):
            raise RuntimeError(
                f"audit on {device!r} after a backward on the CPU: the autograd engine counts the devices "
                "at the first backward of the process; touch the device before it"
            )
        report = AuditReport(device, outcome, stages, len(recorder.calls), outside=outside)
        inner = recorder.differentiates
        replayed = [order_stage(i) for i in range(order + inner + 1)]
        for call in recorder.calls:
            blame = _blame(call, where, replayed, dtype, tolerance, everything=not report.ok)
            if blame and str(blame) not in map(str, report.blamed):
                report.blamed.append(blame)
    return report


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
    return t.detach().clone().requires_grad_(t.requires_grad)


def _caller() -> str:
    """The innermost line below the audit that is neither torch's nor ours; else torch's module."""
    frames = [f for f in traceback.extract_stack() if "/unittest/" not in f.filename]
    audits = [
        i for i, f in enumerate(frames) if f.filename == __file__ and f.name == audit.__name__
    ]
    inside = ("/torch/", "/torch_convfix/")
    below = [f for f in reversed(frames[audits[-1] :]) if "/torch_convfix/" not in f.filename]
    found = [f for f in below if not any(part in f.filename for part in inside)]
    found += [f for f in below if "/torch/nn/modules/" in f.filename]
    return f"{found[0].filename}:{found[0].lineno}" if found else "?"


def _differentiated(tensors: Any) -> Any:
    if any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(tensors)):
        return tensors
    return pytree.tree_map_only(
        Tensor,
        lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()),
        tensors,
    )


def _outside(results: Any, inputs: Any) -> int:
    """How many leaves of the results' graph are not among the inputs."""
    given = {id(t) for t in pytree.tree_leaves(inputs)}
    todo: list[Any] = [t.grad_fn for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    seen: set[Any] = {None}
    found: set[int] = set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            found |= {id(leaf)} - given if leaf is not None else set()
            todo += [n for n, _ in node.next_functions]
    return len(found)


def _double(t: Tensor) -> Tensor:
    dtype = torch.float64 if t.is_floating_point() else t.dtype
    dtype = torch.complex128 if t.is_complex() else dtype
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
