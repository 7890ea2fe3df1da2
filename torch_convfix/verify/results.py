"""What became of each case: the rows of a report, as JSON has them, and what they add up to."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from torch_convfix.verify.compare import Outcome
from torch_convfix.verify.conv_cases import ConvCase
from torch_convfix.verify.derivatives import AFTER_A_WRITE, Failure
from torch_convfix.verify.findings import Finding, Kind
from torch_convfix.verify.module_cases import ModuleCase
from torch_convfix.verify.op_cases import OpCase
from torch_convfix.verify.report import Environment, Report
from torch_convfix.verify.workers import Death

Case = ConvCase | OpCase | ModuleCase
Result = Outcome | Death | Failure  # the last: the sweep itself raised
Group = tuple[str, Kind, str]  # the operator, what is wrong with it, and where

_RESULTS = {cls.__name__: cls for cls in (Outcome, Death, Failure)}


def kind_and_fault(case: Case, result: Result, traced: bool) -> tuple[Kind, str]:
    """What is wrong, and where: the first stage, or how the process ended."""
    if isinstance(result, Failure):
        return Kind.NOT_SWEPT, result.line
    if isinstance(result, Death):
        return (Kind.NOT_TRACEABLE if traced else Kind.CRASH), result.how
    if result.fault():
        return (Kind.ACCEPTS if result.accepted else Kind.WRONG), result.fault()
    if written := [s for s in result.raised if s.removesuffix(AFTER_A_WRITE) in result.errors]:
        return Kind.RAISES, written[0]
    if result.raised:
        kind = Kind.RAISES if isinstance(case, ConvCase) else Kind.REFUSES
        return kind, next(iter(result.raised))
    return Kind.RIGHT, ""


def to_row(case: Case, result: Result, traced: bool) -> dict[str, Any]:
    """A result in types that JSON has; ``case`` is its identity."""
    kind, fault = kind_and_fault(case, result, traced)
    said = {"op": case.op, "kind": kind.name.lower(), "fault": fault}
    return {"case": repr(case), **said, "result": {"is": type(result).__name__, **asdict(result)}}


def from_row(row: Mapping[str, Any]) -> Result:
    """The inverse of `to_row`."""
    fields = dict(row["result"])
    result: Result = _RESULTS[fields.pop("is")](**fields)
    if isinstance(result, Outcome):
        result.errors = {stage: float(error) for stage, error in result.errors.items()}
    return result


def grouped(
    results: Iterable[tuple[Case, Result]], traced: bool
) -> dict[Group, list[tuple[Case, Result]]]:
    """The results of each operator that fail in the same way, or are right."""
    groups: dict[Group, list[tuple[Case, Result]]] = defaultdict(list)
    for case, result in results:
        groups[case.op, *kind_and_fault(case, result, traced)].append((case, result))
    return groups


def make_report(
    environment: Environment,
    results: list[tuple[Case, Result]],
    lines: Mapping[Group, str],
    *,
    traced: bool,
    planned: int,
) -> Report:
    """The report of these results.

    ``lines`` has the Python that shows a group, or nothing for one that a new process does not show.
    """
    skipped: dict[str, int] = defaultdict(int)
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    refused: dict[str, set[str]] = defaultdict(set)
    for case, result in results:
        if not isinstance(result, Outcome):
            continue
        if result.skipped:
            skipped[f"{case.op}: {result.skipped}"] += 1
        for stage, error in result.errors.items():
            errors[case.op][stage] = max(error, errors[case.op].get(stage, 0.0))
        for stage in result.refused:
            refused[case.op].add(stage)
    wrong = {g: of for g, of in grouped(results, traced).items() if g[1] is not Kind.RIGHT}
    artefacts = [g for g in wrong if lines.get(g) == ""]
    findings = [_finding(g, of, lines.get(g, "")) for g, of in wrong.items() if g not in artefacts]
    findings.sort(key=lambda f: (list(Kind).index(f.kind), -f.error, f.op))
    return Report(
        environment,
        cases=len(results),
        compared=sum(isinstance(r, Outcome) and bool(r.errors) for _, r in results),
        findings=findings,
        skipped=dict(skipped),
        refused={op: sorted(stages) for op, stages in refused.items()},
        errors={op: dict(stages) for op, stages in errors.items()},
        artefacts=[f"{op}, {fault}" for op, _, fault in artefacts],
        planned=planned,
        rows=[to_row(case, result, traced) for case, result in results],
    )


def _finding(group: Group, of: list[tuple[Case, Result]], line: str) -> Finding:
    op, kind, fault = group
    stages: dict[str, float] = {}
    for _, result in of:
        if isinstance(result, Outcome):
            for stage in result.wrong:
                stages[stage] = max(stages.get(stage, 0.0), result.errors[stage])
    first = of[0][1]
    detail = first.output if isinstance(first, Death) else ""
    if isinstance(first, Outcome):
        detail = first.raised.get(fault, "")
    return Finding(op, kind, fault, stages, len(of), line, detail)
