"""The sweep: every case on the device, and what is to be said of those that fail."""

import os
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch

from torch_convfix.verify import conv_cases
from torch_convfix.verify.compare import Outcome
from torch_convfix.verify.conv_cases import ConvCase
from torch_convfix.verify.op_cases import OpCase, op_cases
from torch_convfix.verify.report import Environment, Finding, Kind, Report
from torch_convfix.verify.workers import Death, Ready, Settings, Spell, Worker, worker

Case = ConvCase | OpCase
Result = Outcome | Death
Progress = Callable[[int, int, str], None]  # done, of how many, the operator

_TIMEOUT = 180.0  # seconds a case may take
_MOST_DEATHS_TO_SHRINK = 12  # each costs a start of the process


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
    """
    settings = Settings(device, dtype, orders, stock, tolerance, tuple(imports))
    with worker(settings, timeout) as first:
        ready = first.start()
        todo = _cases(ready, cases, seed, all_ops, only)
        results = _run_all(todo, first, settings, jobs or min(os.cpu_count() or 1, 4), progress)
    reporter = _Reporter(settings, ready, timeout)
    return reporter.report(results)


def _cases(ready: Ready, count: int, seed: int, all_ops: bool, only: str) -> list[Case]:
    drawn = random.Random(seed)
    every: list[Case] = [
        *conv_cases.declared(),
        *(conv_cases.draw(drawn) for _ in range(count)),
        *op_cases(getattr(torch, ready.dtype), all_ops=all_ops),
    ]
    return [case for case in every if fnmatchcase(case.op, only)]


def _run_all(
    todo: list[Case], first: Worker, settings: Settings, jobs: int, progress: Progress
) -> list[tuple[Case, Result]]:
    results: list[tuple[Case, Result]] = []
    queue, lock = deque(todo), threading.Lock()
    errors: list[Exception] = []

    def work(own: Worker) -> None:
        try:
            while True:
                with lock:
                    if not queue or errors:
                        return
                    case = queue.popleft()
                result = own.run(case)
                with lock:
                    results.append((case, result))
                    progress(len(results), len(todo), case.op)
        except Exception as e:  # raised again by the caller's thread
            errors.append(e)
        finally:
            own.stop()

    workers = [first, *(Worker(settings, first.timeout) for _ in range(jobs - 1))]
    threads = [threading.Thread(target=work, args=(w,)) for w in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


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
    def __init__(self, settings: Settings, ready: Ready, timeout: float):
        self._settings, self._ready, self._timeout = settings, ready, timeout
        self._artefacts: list[str] = []

    def report(self, results: list[tuple[Case, Result]]) -> Report:
        groups: dict[tuple[str, Kind, str], list[tuple[Case, Result]]] = defaultdict(list)
        skipped: dict[str, int] = defaultdict(int)
        errors: dict[str, dict[str, float]] = defaultdict(dict)
        refused: dict[str, set[str]] = defaultdict(set)
        for case, result in results:
            groups[case.op, *_kind_and_fault(case, result, self._ready.traced)].append((case, result))
            if isinstance(result, Outcome):
                if result.skipped:
                    skipped[f"{case.op}: {result.skipped}"] += 1
                for stage, error in result.errors.items():
                    errors[case.op][stage] = max(error, errors[case.op].get(stage, 0.0))
                for stage in result.refused:
                    refused[case.op].add(stage)
        findings = []
        for (op, kind, fault), group in groups.items():
            if kind is not Kind.RIGHT:
                found = self._finding(op, kind, fault, group)
                findings += [found] if found else []
        findings.sort(key=lambda f: (f.kind.value, -f.error, f.op))
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
        self, op: str, kind: Kind, fault: str, group: list[tuple[Case, Result]]
    ) -> Finding | None:
        group = sorted(group, key=lambda pair: pair[0].numel)
        if kind is Kind.REFUSES or kind is Kind.NOT_TRACEABLE:
            line = self._spell(group[0][0])
        else:
            with worker(self._settings, self._timeout) as own:
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
        """How the case is spelled, made smaller if it can be; empty if it is right in a new process."""

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
