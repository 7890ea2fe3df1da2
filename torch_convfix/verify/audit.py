"""Compare a whole model or loss on a device with float64 on the CPU, and name the call to blame."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_convfix._as_function import as_function
from torch_convfix.verify.calls import Recorded, Recorder, tensors_of
from torch_convfix.verify.compare import REFUSED, Outcome, compare
from torch_convfix.verify.cut import OtherCallsError, Target, first_wrong
from torch_convfix.verify.derivatives import (
    VALUE,
    Call,
    Program,
    evaluate,
    order_stage,
    random_like,
)
from torch_convfix.verify.devices import Device, get_device, kernels
from torch_convfix.verify.differences import TOLERANCE, error_of_order
from torch_convfix.verify.report import error_text
from torch_convfix.verify.transforms import WORDS


class NothingToAuditError(ValueError):
    """The target has no derivative to audit."""


@dataclass
class Blame:
    """A call that is wrong: alone with the inputs that it had, or as the end of the calls up to it."""

    name: str
    where: str  # file:line of the caller
    shapes: list[tuple[int, ...]]
    outcome: Outcome
    alone: bool = True
    feeds: list[str] = field(default_factory=list)  # the calls that made or wrote its inputs

    @classmethod
    def of(cls, call: Recorded, outcome: Outcome, *, alone: bool = True) -> "Blame":
        """A call by its record."""
        shapes = [tuple(t.shape) for t in tensors_of(call.args, call.kwargs)]
        return cls(call.name, call.where, shapes, outcome, alone, call.feeds)

    def __str__(self) -> str:
        shapes = ", ".join(str(list(s)) for s in self.shapes)
        fed = "" if self.alone else "".join(f", fed by {feed}" for feed in self.feeds)
        parts = [f"{s} by {error_text(self.outcome.errors[s])}" for s in self.outcome.wrong]
        parts += [f"{s} raises {line}" for s, line in self.outcome.raised.items()]
        return f"{self.name}({shapes}) at {self.where}{fed}: {', '.join(parts)}"


@dataclass
class AuditReport:
    """The result of `audit`. `print` it; `ok` says whether device and CPU agree."""

    device: str
    outcome: Outcome
    stages: list[str]  # that were asked for
    calls: int = 0
    blamed: list[Blame] = field(default_factory=list)
    outside: int = 0  # tensors that it differentiates and that are not among the inputs
    random: str = ""  # the first call that draws random numbers
    # Stages that PyTorch lacks on the CPU, compared with ours there: the error of the reference against
    # finite differences, None where these say nothing; and PyTorch's refusal.
    ours: dict[str, tuple[float | None, str]] = field(default_factory=dict)
    cut: str = ""  # what cutting the forward found

    @property
    def ok(self) -> bool:
        """Whether something was compared, nothing was left out, and all agrees."""
        wrong = self.outcome.wrong or self.outcome.raised or self.blamed
        unsure = [e for e, _ in self.ours.values() if e is None or e > TOLERANCE]
        left_out = self.outside or self.outcome.refused or unsure
        return bool(self.outcome.errors) and not (wrong or left_out)

    def __str__(self) -> str:
        lines = []
        for stage, error in self.outcome.errors.items():
            verdict = f"WRONG by {error_text(error)}" if stage in self.outcome.wrong else "right"
            lines.append(f"{stage}: {verdict}{self._reference(stage)}")
        lines += [f"{stage}: raises {line}" for stage, line in self.outcome.raised.items()]
        lines += [
            f"{stage}: the CPU refuses: {line}" for stage, line in self.outcome.refused.items()
        ]
        if self.outcome.skipped == "random" and self.random:
            lines.append(
                f"not compared: random, by {self.random}: give what is drawn as an input (of dropout: call eval())"
            )
        elif self.outcome.skipped:
            lines.append(f"not compared: {self.outcome.skipped}")
            if self.outcome.skipped.startswith(REFUSED):
                lines.append(
                    "what it closes over keeps its dtype and its device: give such as inputs"
                )
        elif not self.outcome.raised:
            left = [
                s for s in self.stages if s not in {**self.outcome.errors, **self.outcome.refused}
            ]
            lines += [f"{s}: nothing to compare, no input can be differentiated" for s in left]
        if self.outside:
            lines.append(
                f"not compared: derivatives by {self.outside} tensors that require a gradient and are "
                "not among the inputs: give them, or the module that has them, as inputs"
            )
        if (self.outcome.wrong or self.outcome.raised) and all(not b.alone for b in self.blamed):
            lines.append(f"none of its {self.calls} calls is wrong alone{self.cut}")
        lines += [f"to blame: {blame}" for blame in self.blamed]
        return "\n".join(lines)

    def _reference(self, stage: str) -> str:
        if stage not in self.ours:
            return ""
        error, line = self.ours[stage]
        verdict = "could not be checked by finite differences"
        if error is not None:
            wrong = error > TOLERANCE
            verdict = f"finite differences {'REFUTE' if wrong else 'confirm'} to {error:.0e}"
        return f", by our own formulas on the CPU, which {verdict} (PyTorch there: {line})"


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
            gradients come from `torch.autograd.grad`, not from ``.grad``. What it makes differentiable
            itself, as by ``x.requires_grad_()``, counts as an input. It may be a transform of
            `torch.func`.
        inputs: on any device, tensors, modules, and lists and dictionaries of them. The parameters of
            modules are differentiated, and the tensors that require a gradient; where nothing does,
            all floating-point tensors are.
        device: as in `torch_convfix.verify.run`.
        order: the highest order of derivatives.
        stock: run with the device's own kernels in place of ours.
        dtype: on the device; by default as in `torch_convfix.verify.run`.
        tolerance: relative error from which a result is wrong; by default by ``dtype``.

    Returns:
        A report. Where they disagree, each torch function call of the forward is replayed alone with
        the inputs that it had, and those that are wrong alone are named. Where none is, the forward is
        cut after a call, found by bisection, up to which it is wrong, while up to the call before it is
        right. A custom `torch.autograd.Function` is also compared with the finite differences of its
        own forward. A derivative that PyTorch lacks on the CPU is compared with ours there, and that
        with finite differences.

    Raises:
        NothingToAuditError: if nothing that ``fn`` returns can be differentiated by its inputs.
    """
    where = get_device(device)
    function, tensors = as_function(fn, inputs)
    tensors = _differentiated([_on_cpu(t) for t in tensors])
    stages = [order_stage(i) for i in range(order + 1)]
    with kernels(device, stock=stock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_float64 = pytree.tree_map_only(Tensor, _double, tensors)
        recorder = Recorder()
        copies = [t.clone() for t in in_float64]
        results, ran = None, False
        with contextlib.suppress(Exception), recorder.watching():  # `compare` meets it again
            results = function(copies)
            ran = True
        if order and ran and not recorder.random:
            _check_differentiable(results, in_float64)
        audited = _Audited(
            Target(function) if recorder.made else function,
            tensors,
            where,
            dtype or where.default_dtype(),
            tolerance,
        )
        report = AuditReport(device, audited.compare(stages), stages, len(recorder.calls))
        report.outside = _outside(results, [*in_float64, *recorder.made])
        report.random = recorder.random
        if any("device_ready_queues_" in line for line in report.outcome.raised.values()):
            raise RuntimeError(
                f"audit on {device!r} after a backward on the CPU: the autograd engine counts the devices "
                "at the first backward of the process; touch the device before it"
            )
        _compare_with_ours(report, audited, in_float64, stock=stock)
        audited.reference_is_stock = not report.ours
        found = report.outcome
        everything = bool(found.wrong or found.raised or found.skipped or report.outside)
        for call in recorder.calls:
            highest = order + recorder.differentiated_after(call) + len(call.word)
            outcome = _alone(call, audited, highest, everything=everything)
            if outcome.wrong or outcome.raised:
                blame = Blame.of(call, outcome)
                if str(blame) not in map(str, report.blamed):
                    report.blamed.append(blame)
        if (found.wrong or found.raised) and not report.blamed:
            _blame_a_prefix(report, audited, function, recorder)
    return report


@dataclass
class _Audited:
    """A target and how to compare it."""

    function: Callable[..., Any]
    tensors: list[Tensor]
    device: Device
    dtype: torch.dtype
    tolerance: float | None
    reference_is_stock: bool = True

    def compare(self, stages: Sequence[str], *, stock: bool = True) -> Outcome:
        """The whole."""
        return self.compare_call(Call(self.function, (self.tensors,)), stages, stock=stock)

    def compare_call(
        self, call: Call, stages: Sequence[str], size: float = 0.0, *, stock: bool = True
    ) -> Outcome:
        """A part of it, or the whole."""
        return compare(call, self.device, stages, self.dtype, self.tolerance, size, stock=stock)


def _compare_with_ours(
    report: AuditReport, audited: _Audited, in_float64: list[Tensor], *, stock: bool
) -> None:
    """Where the CPU refuses and ours there does not, compare with ours; if ``stock``, say so."""
    outcome = report.outcome
    refusals = dict(outcome.refused)
    if outcome.skipped.startswith(REFUSED):
        refusals = {VALUE: outcome.skipped.removeprefix(REFUSED)}
    if not refusals:
        return
    if stock:
        program = Program(audited.function, (in_float64,), {})
        drawn: dict[str, Tensor] = {}
        with kernels("cpu", stock=False):
            ours = evaluate(
                program,
                program.tensors,
                report.stages,
                lambda name, like: drawn.setdefault(name, random_like(len(drawn), like)),
            )
        remedy = f"; torch_convfix has it: enable('cpu'), enable({report.device!r})"
        if all(isinstance(ours.get(stage), dict) for stage in refusals):
            outcome.refused = {s: line + remedy for s, line in outcome.refused.items()}
            outcome.skipped += remedy if outcome.skipped else ""
        return
    ours_too = audited.compare(report.stages, stock=False)
    if ours_too.skipped:
        return
    program = Program(audited.function, (in_float64,), {})
    first = next(iter(refusals.values()))  # later orders are not reached
    for i, stage in enumerate(report.stages):
        if stage in outcome.errors or stage in outcome.raised:
            continue
        if stage in ours_too.raised:
            outcome.raised[stage] = ours_too.raised[stage]
        if stage in ours_too.wrong:
            outcome.wrong[stage] = ours_too.wrong[stage]
        if stage in ours_too.errors:
            outcome.errors[stage] = ours_too.errors[stage]
            error = error_of_order(program, i, stock=False) if i else None
            report.ours[stage] = (error, refusals.get(stage, first))
    outcome.refused, outcome.skipped = ours_too.refused, ""


def _alone(call: Recorded, audited: _Audited, highest: int, *, everything: bool) -> Outcome:
    """A call with the inputs that it had; a custom Function also against differences of its forward."""
    outcome = Outcome()
    if everything:
        stages = [order_stage(i) for i in range(highest + 1)]
        stages += [s for s, word in WORDS.items() if word == call.word and "F" in word]
        outcome = audited.compare_call(
            Call(call.fn, call.args, call.kwargs), stages, stock=audited.reference_is_stock
        )
    if call.custom and not outcome.wrong:
        error = error_of_order(Program(call.fn, call.args, call.kwargs), 1)
        if error is not None and error > TOLERANCE:
            stage = "gradient against finite differences, on the CPU too"
            outcome = Outcome(errors={stage: error}, wrong={stage: "along a random direction"})
    return outcome


# The results of a prefix that are smaller may be zero but for the rounding of larger terms.
_SIZE_OF_A_PREFIX = 1e-6


def _blame_a_prefix(
    report: AuditReport, audited: _Audited, function: Callable[..., Any], recorder: Recorder
) -> None:
    """Name the call up to which the forward is wrong, while up to the one before it is right."""
    failing = min(report.stages.index(s) for s in (*report.outcome.wrong, *report.outcome.raised))
    outcomes: dict[int, Outcome] = {}

    def is_wrong(call: Recorded) -> bool:
        # What the target differentiates itself, the prefix does not; it keeps a graph of that.
        more = recorder.differentiated_after(call)
        asked = [order_stage(i) for i in range(failing + more + 1)]
        graph = [order_stage(len(asked))] if more else []
        target = Target(function, call)
        outcome = audited.compare_call(
            Call(target, (audited.tensors,)),
            [*asked, *graph],
            _SIZE_OF_A_PREFIX,
            stock=audited.reference_is_stock,
        )
        if target.diverged:
            raise OtherCallsError
        outcome.wrong = {s: worst for s, worst in outcome.wrong.items() if s in asked}
        outcome.raised = {s: line for s, line in outcome.raised.items() if s in asked}
        outcomes[call.index] = outcome
        return bool(outcome.wrong or outcome.raised)

    try:
        found = first_wrong(recorder.calls, is_wrong)
    except OtherCallsError:
        report.cut = "; the device is given other calls than the CPU, so the forward was not cut"
        return
    if found is None:
        report.cut = f", nor is the forward up to any of the {len(outcomes)} calls that were tried"
        return
    call = recorder.calls[found]
    report.blamed.append(Blame.of(call, outcomes[call.index], alone=False))
    report.cut = (
        f"; the forward is right up to call {found} and wrong up to call {found + 1} "
        f"({len(outcomes)} prefixes compared)"
    )


def _check_differentiable(results: Any, inputs: list[Tensor]) -> None:
    given = any(t.requires_grad for t in inputs)
    returned = tensors_of(results)
    if given and returned and not any(t.requires_grad for t in returned):
        dtypes = ", ".join(sorted({str(t.dtype) for t in returned}))
        raise NothingToAuditError(
            "fn must return something that can be differentiated by its inputs, got tensors of "
            f"{dtypes} that depend on none of them differentiably"
        )


def _on_cpu(t: Tensor) -> Tensor:
    return t if t.device.type == "cpu" else t.detach().cpu().requires_grad_(t.requires_grad)


def _differentiated(tensors: list[Tensor]) -> list[Tensor]:
    if any(t.requires_grad for t in tensors):
        return tensors
    return [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]


def _outside(results: Any, known: Sequence[Tensor]) -> int:
    """How many leaves of the results' graph are not among the known."""
    given = {id(t) for t in known}
    todo: list[Any] = [t.grad_fn for t in tensors_of(results)]
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
