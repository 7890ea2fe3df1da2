"""The sweep: every case on the device, and what is to be said of those that fail."""

import itertools
import os
import queue
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from torch_convfix.verify import conv_cases
from torch_convfix.verify.compare import TOLERANCES, Outcome
from torch_convfix.verify.conv_cases import ConvCase
from torch_convfix.verify.findings import Finding, Kind
from torch_convfix.verify.op_cases import OpCase, op_cases
from torch_convfix.verify.report import Environment, Report
from torch_convfix.verify.workers import Death, Ready, Settings, Spell, Worker, worker

Case = ConvCase | OpCase
Result = Outcome | Death
Item = TypeVar("Item")
Answer = TypeVar("Answer")
Progress = Callable[[int, int, str], None]  # done, of how many, the operator

_DTYPES = [str(dtype).removeprefix("torch.") for dtype in TOLERANCES]
_TIMEOUT = 180.0  # seconds a case may take
_MOST_DEATHS_TO_SHRINK = 4  # each costs a start of the process


class CannotStart(ValueError):
    """What keeps a sweep from starting, in one sentence; never a fault that it finds."""


def run(
    device: str = "xla",
    *,
    cases: int = 40,
    seed: int = 0,
    dtype: str = "",
    orders: int = 2,
    stock: bool = False,
    all_ops: bool = False,
    only: str = "*",
    imports: Sequence[str] = (),
    tolerance: float | None = None,
    jobs: int | None = None,
    timeout: float = _TIMEOUT,
    progress: Progress = lambda done, of, op: None,
) -> Report:
    """Compare operators on a device with float64 on the CPU, at every order.

    Args:
        device: a device type's name; ``tpu`` without a TPU is traced by TorchTPU and run on XLA:CPU.
        cases: how many random convolutions, drawn by ``seed``, on top of the declared ones.
        dtype: of the inputs on the device, as ``"float32"``. By default float64 where XLA:CPU
            computes, float32 elsewhere.
        orders: the highest order of derivatives; convolutions go one further.
        stock: run with the device's own kernels in place of ours.
        all_ops: take all of PyTorch's operator database, not only what convolutional nets use.
        only: a pattern for the operators' names, as ``"nn.functional.conv*"``.
        imports: modules to import first, for a backend that registers itself.
        tolerance: relative error from which a result is wrong; by default by ``dtype``.
        jobs: processes at a time; by default as many as there are CPUs, at most 4.
        timeout: seconds a case may take.
        progress: called after each case.

    Raises:
        CannotStart: a ValueError; for an unknown device or dtype, a device that does not start, or
            a pattern that no operator has.
    """
    _check_arguments(device, dtype, all_ops, only)
    for name, value, least in (("cases", cases, 0), ("orders", orders, 0), ("jobs", jobs or 1, 1)):
        if value < least:
            raise CannotStart(f"{name} must be at least {least}, got {value}")
    settings = Settings(device, dtype, orders, stock, tolerance, tuple(imports))
    jobs = jobs or min(os.cpu_count() or 1, 4)
    with worker(settings, timeout) as first:
        ready = _start(first, device)
        todo = list(_cases(ready.dtype, cases, seed, all_ops, only))
        count = itertools.count(1)

        def run_case(own: Worker, case: Case) -> tuple[Case, Result]:
            result = own.run(case)
            progress(next(count), len(todo), case.op)
            return case, result

        results = _in_workers(run_case, todo, [first], settings, jobs, timeout)
    return _Reporter(settings, ready, jobs, timeout).report(results)


def _check_arguments(device: str, dtype: str, all_ops: bool, only: str) -> None:
    if dtype and dtype not in _DTYPES:
        raise CannotStart(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotStart("device 'cuda' is not available here")
    if not any(_cases(dtype or "float32", 0, 0, all_ops, only)):
        raise CannotStart(
            f"only must match an operator, as 'nn.functional.*pool*' does, got {only!r}; "
            "with --all (all_ops), any operator of PyTorch's database"
        )


def _start(first: Worker, device: str) -> Ready:
    try:
        return first.start()
    except RuntimeError as error:
        last = str(error).splitlines()[-1]  # of a traceback, what was raised
        raise CannotStart(f"device {device!r} did not start: {last}") from error


def _cases(dtype: str, count: int, seed: int, all_ops: bool, only: str) -> Iterator[Case]:
    drawn = random.Random(seed)
    convolutions = [*conv_cases.declared(), *(conv_cases.draw(drawn) for _ in range(count))]
    return itertools.chain(
        (case for case in convolutions if fnmatchcase(case.op, only)),
        op_cases(getattr(torch, dtype), all_ops=all_ops, only=only),
    )


def _in_workers(
    work: Callable[[Worker, Item], Answer],
    items: Sequence[Item],
    workers: list[Worker],
    settings: Settings,
    jobs: int,
    timeout: float,
) -> list[Answer]:
    """``work`` of every item, ``jobs`` at a time, each on a worker of its own."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for own in [*workers, *(Worker(settings, timeout) for _ in range(jobs - len(workers)))]:
        idle.put(own)

    def one(item: Item) -> Answer:
        own = idle.get()
        try:
            return work(own, item)
        finally:
            idle.put(own)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, items))
    finally:
        for _ in range(jobs):
            idle.get().stop()


def _kind_and_fault(case: Case, result: Result, traced: bool) -> tuple[Kind, str]:
    if isinstance(result, Death):
        return (Kind.NOT_TRACEABLE if traced else Kind.CRASH), result.how
    if result.fault():
        return (Kind.ACCEPTS if result.accepted else Kind.WRONG), result.fault()
    if result.raised:
        kind = Kind.RAISES if isinstance(case, ConvCase) else Kind.REFUSES
        return kind, next(iter(result.raised))
    return Kind.RIGHT, ""


class _Reporter:
    def __init__(self, settings: Settings, ready: Ready, jobs: int, timeout: float):
        self._settings, self._ready, self._jobs, self._timeout = settings, ready, jobs, timeout
        self._artefacts: list[str] = []

    def report(self, results: list[tuple[Case, Result]]) -> Report:
        groups: dict[tuple[str, Kind, str], list[tuple[Case, Result]]] = defaultdict(list)
        skipped: dict[str, int] = defaultdict(int)
        errors: dict[str, dict[str, float]] = defaultdict(dict)
        refused: dict[str, set[str]] = defaultdict(set)
        for case, result in results:
            kind, fault = _kind_and_fault(case, result, self._ready.traced)
            groups[case.op, kind, fault].append((case, result))
            if isinstance(result, Outcome):
                if result.skipped:
                    skipped[f"{case.op}: {result.skipped}"] += 1
                for stage, error in result.errors.items():
                    errors[case.op][stage] = max(error, errors[case.op].get(stage, 0.0))
                for stage in result.refused:
                    refused[case.op].add(stage)
        wrong = [(key, group) for key, group in groups.items() if key[1] is not Kind.RIGHT]
        found = _in_workers(
            lambda own, item: self._finding(own, *item[0], item[1]),
            wrong, [], self._settings, self._jobs, self._timeout,
        )  # fmt: skip
        findings = [f for f in found if f]
        findings.sort(key=lambda f: (list(Kind).index(f.kind), -f.error, f.op))
        return Report(
            environment=Environment.here(self._settings, self._ready),
            cases=len(results),
            compared=sum(isinstance(r, Outcome) and bool(r.errors) for _, r in results),
            findings=findings,
            skipped=dict(skipped),
            refused={op: sorted(stages) for op, stages in refused.items()},
            errors={op: dict(stages) for op, stages in errors.items()},
            artefacts=self._artefacts,
        )

    def _finding(
        self, own: Worker, op: str, kind: Kind, fault: str, group: list[tuple[Case, Result]]
    ) -> Finding | None:
        # First those that can be shrunk.
        group = sorted(group, key=lambda p: (not isinstance(p[0], ConvCase), p[0].numel))
        if kind is Kind.REFUSES or kind is Kind.NOT_TRACEABLE:
            line = self._spell(group[0][0])
        else:
            line = next(
                filter(None, (self._confirm(own, c, kind, fault) for c, _ in group[:4])), ""
            )
            if not line:
                self._artefacts.append(f"{op}, {fault}")
                return None
        outcomes = [r for _, r in group if isinstance(r, Outcome)]
        stages: dict[str, float] = {}
        for outcome in outcomes:
            for stage in outcome.wrong:
                stages[stage] = max(stages.get(stage, 0.0), outcome.errors[stage])
        first = group[0][1]
        detail = first.output if isinstance(first, Death) else first.raised.get(fault, "")
        return Finding(op, kind, fault, stages, len(group), self._line(line), detail)

    def _confirm(self, own: Worker, case: Case, kind: Kind, fault: str) -> str:
        """How the case is spelled, made smaller if it can be; empty if it is right in this process."""

        def fails(result: Result) -> bool:
            return _kind_and_fault(case, result, self._ready.traced) == (kind, fault)

        if isinstance(case, ConvCase):
            if not fails(own.run(case)):
                return ""
            most = _MOST_DEATHS_TO_SHRINK if kind is Kind.CRASH else 150
            return conv_cases.shrink(case, lambda c: fails(own.run(c)), most).spell()
        for redraw in (True, False):
            answer = own.run(Spell(case, redraw))
            if isinstance(answer, Death):
                if fails(answer):
                    return self._spell(case)
            elif fails(answer[0]):
                return answer[1]
        return ""

    def _spell(self, case: Case) -> str:
        if isinstance(case, ConvCase):
            return case.spell()
        return case.spell(getattr(torch, self._ready.dtype), redraw=False)

    def _line(self, spelled: str) -> str:
        options = f", device={self._settings.device!r}" + ", stock=True" * self._settings.stock
        return (
            "import torch; from torch_convfix.verify import check, tensor; "
            f"check({spelled}{options})"
        )
