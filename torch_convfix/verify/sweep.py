"""The sweep: every case on the device, and what is to be said of those that fail."""

import itertools
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from torch_convfix.verify import conv_cases
from torch_convfix.verify.compare import TOLERANCES
from torch_convfix.verify.conv_cases import ConvCase
from torch_convfix.verify.derivatives import Failure
from torch_convfix.verify.findings import Kind
from torch_convfix.verify.module_cases import module_cases
from torch_convfix.verify.op_cases import op_cases
from torch_convfix.verify.report import Environment, Report
from torch_convfix.verify.results import (
    Case,
    Group,
    Result,
    from_row,
    grouped,
    kind_and_fault,
    make_report,
)
from torch_convfix.verify.workers import Death, Ready, Settings, Spell, Worker, worker

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Progress = Callable[[int, int, str], None]  # done, of how many, the operator

_DTYPES = [str(dtype).removeprefix("torch.") for dtype in TOLERANCES]
_LIMIT = 180.0  # seconds a case may take
_MOST_DEATHS_TO_SHRINK = 4  # each costs a start of the process
_KEEP_EVERY = 5.0  # seconds
_SPELLED = ("tensor", "ConvCase", "OpCase", "ModuleCase")  # names that a line may need


class CannotStart(ValueError):
    """What keeps a sweep from starting, in one sentence; never a fault that it finds."""


def run(
    device: str = "xla",
    *,
    cases: int = 40,
    seed: int = 0,
    dtype: str = "",
    order: int = 2,
    stock: bool = False,
    all_ops: bool = False,
    only: str = "*",
    imports: Sequence[str] = (),
    tolerance: float | None = None,
    jobs: int | None = None,
    limit: float = _LIMIT,
    progress: Progress = lambda done, of, op: None,
    keep: Callable[[Report], None] | None = None,
    resume: Mapping[str, Any] | None = None,
) -> Report:
    """Compare operators on a device with float64 on the CPU, at every order.

    Args:
        device: a device type's name; ``tpu`` without a TPU is traced by TorchTPU and run on XLA:CPU.
        cases: how many random convolutions, drawn by ``seed``, on top of the declared ones.
        dtype: of the inputs on the device, as ``"float32"``. By default float64 where XLA:CPU
            computes, float32 elsewhere.
        order: the highest order of derivatives; convolutions go one further.
        stock: run with the device's own kernels in place of ours.
        all_ops: take all of PyTorch's operator and module databases, not only what convolutional nets use.
        only: a pattern for the operators' names, as ``"nn.functional.conv*"``.
        imports: modules to import first, for a backend that registers itself.
        tolerance: relative error from which a result is wrong; by default by ``dtype``.
        jobs: processes at a time; by default as many as there are CPUs, at most 4.
        limit: seconds a case may take.
        progress: called after each case.
        keep: called with the report so far, every few seconds, at the end and where it is interrupted.
        resume: `Report.to_dict` of an earlier sweep, or what JSON made of it: its cases are not run
            again.

    Raises:
        CannotStart: a ValueError; for an unknown device or dtype, a device that does not start, a
            pattern that no operator has, or an earlier sweep of something else.
    """
    _check_arguments(device, dtype, all_ops, only)
    for name, value, least in (("cases", cases, 0), ("order", order, 0), ("jobs", jobs or 1, 1)):
        if value < least:
            raise CannotStart(f"{name} must be at least {least}, got {value}")
    settings = Settings(device, dtype, order, stock, tolerance, tuple(imports))
    jobs = jobs or min(os.cpu_count() or 1, 4)
    with worker(settings, limit) as first:
        ready = _start(first, device)
        todo = list(_cases(ready.dtype, cases, seed, all_ops, only))
        sweep = _Sweep(settings, ready, len(todo), jobs, limit, keep)
        if resume:
            sweep.go_on_from(resume, todo)
        try:
            sweep.run(todo, progress, first)
            sweep.tell()
        finally:
            sweep.keep()
    return sweep.report()


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
        module_cases(getattr(torch, dtype), all_ops=all_ops, only=only),
    )


class _Sweep:
    """What is known so far of each case, and of each way to fail."""

    def __init__(
        self,
        settings: Settings,
        ready: Ready,
        planned: int,
        jobs: int,
        limit: float,
        keep: Callable[[Report], None] | None,
    ):
        self._settings, self._ready, self._planned, self._keep = settings, ready, planned, keep
        self._jobs, self._limit = jobs, limit
        self._environment = Environment.here(settings, ready)
        self._results: dict[Case, Result] = {}
        self._lines: dict[Group, str] = {}
        self._lock = threading.Lock()
        self._kept = time.monotonic()

    def go_on_from(self, earlier: Mapping[str, Any], todo: Sequence[Case]) -> None:
        """Take over the results of an earlier sweep of the same."""
        own = Report(self._environment, 0, 0, []).to_dict()["environment"]
        for name, value in own.items():
            if (theirs := earlier.get("environment", {}).get(name)) != value:
                raise CannotStart(
                    f"cannot go on from a sweep whose {name} was {theirs!r}; now it is {value!r}"
                )
        rows = {row["case"]: row for row in earlier["rows"]}
        self._results = {c: from_row(rows[repr(c)]) for c in todo if repr(c) in rows}
        for f in earlier["findings"]:
            if f["line"]:
                self._lines[f["op"], Kind[f["kind"].upper()], f["fault"]] = f["line"]

    def run(self, todo: Sequence[Case], progress: Progress, first: Worker) -> None:
        """Every case of ``todo`` that has no result; ``first`` has started."""
        left = [case for case in todo if case not in self._results]

        def one(own: Worker, case: Case) -> tuple[Case, Result]:
            try:
                return case, own.run(case)
            except Exception as e:
                return case, Failure.of(e)

        def done(answer: tuple[Case, Result]) -> None:
            self._results.update([answer])
            progress(len(self._results), len(todo), answer[0].op)

        self._in_workers(one, left, done, [first])

    def tell(self) -> None:
        """Find the line that shows each group of failures that has none."""
        wrong = [
            (group, of)
            for group, of in grouped(self._results.items(), self._ready.traced).items()
            if group[1] is not Kind.RIGHT and group not in self._lines
        ]

        def one(own: Worker, item: tuple[Group, list[tuple[Case, Result]]]) -> tuple[Group, str]:
            group, of = item
            try:
                return group, self._shown(own, group, [case for case, _ in of])
            except (
                Exception
            ):  # in making it smaller, or spelling it: the case is known all the same
                return group, self._line(repr(of[0][0]))

        self._in_workers(one, wrong, lambda answer: self._lines.update([answer]))

    def report(self) -> Report:
        """Of what is known."""
        return make_report(
            self._environment,
            list(self._results.items()),
            self._lines,
            traced=self._ready.traced,
            planned=self._planned,
        )

    def keep(self) -> None:
        """Hand the report so far to who asked for it."""
        if self._keep:
            self._keep(self.report())
            self._kept = time.monotonic()

    def _in_workers(
        self,
        work: Callable[[Worker, Item], Answer],
        items: Sequence[Item],
        done: Callable[[Answer], None],
        started: Sequence[Worker] = (),
    ) -> None:
        """``work`` of every item, ``jobs`` at a time, each on a worker of its own."""
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        new = self._jobs - len(started)
        workers = [*started, *(Worker(self._settings, self._limit) for _ in range(new))]
        for own in workers:
            idle.put(own)
        ended = False

        def one(item: Item) -> None:
            own = idle.get()
            try:
                answer = work(own, item)
                with self._lock:
                    if ended:  # the worker was killed: that is no answer
                        return
                    done(answer)
                    if time.monotonic() - self._kept > _KEEP_EVERY:
                        self.keep()
            finally:
                idle.put(own)

        pool = ThreadPoolExecutor(self._jobs)
        try:
            for _ in pool.map(one, items):
                pass
        finally:
            with self._lock:
                ended = True
            pool.shutdown(wait=False, cancel_futures=True)
            for own in workers:
                own.kill()
            pool.shutdown(wait=True)
            for own in workers:
                own.stop()

    def _shown(self, own: Worker, group: Group, cases: list[Case]) -> str:
        """The Python that shows a group; empty if it is right in this process."""
        _, kind, fault = group
        # First those that can be shrunk.
        cases = sorted(cases, key=lambda case: (not isinstance(case, ConvCase), case.numel))
        if kind in (Kind.REFUSES, Kind.NOT_TRACEABLE, Kind.NOT_SWEPT):
            return self._line(self._spell(cases[0]))
        spelled = (self._confirm(own, case, kind, fault) for case in cases[:4])
        line = next(filter(None, spelled), "")
        return line and self._line(line)

    def _confirm(self, own: Worker, case: Case, kind: Kind, fault: str) -> str:
        """How the case is spelled, made smaller if it can be; empty if it is right in this process."""

        def fails(result: Result) -> bool:
            return kind_and_fault(case, result, self._ready.traced) == (kind, fault)

        if isinstance(case, ConvCase):
            if not fails(own.run(case)):
                return ""
            most = _MOST_DEATHS_TO_SHRINK if kind is Kind.CRASH else 150
            return conv_cases.shrink(case, lambda c: fails(own.run(c)), most).spell()
        for redraw in (True, False):
            answer = own.run(Spell(case, redraw))
            if isinstance(answer, Failure) or (isinstance(answer, Death) and fails(answer)):
                return self._spell(case)
            if isinstance(answer, tuple) and fails(answer[0]):
                return answer[1]
        return ""

    def _spell(self, case: Case) -> str:
        if isinstance(case, ConvCase):
            return case.spell()
        return case.spell(getattr(torch, self._ready.dtype), redraw=False)

    def _line(self, spelled: str) -> str:
        options = f", device={self._settings.device!r}" + ", stock=True" * self._settings.stock
        names = ", ".join(n for n in _SPELLED if re.search(rf"(?<![\w.]){n}\(", spelled))
        return (
            f"import torch; from torch_convfix.verify import check{', ' * bool(names)}{names}; "
            f"check({spelled}{options})"
        )
