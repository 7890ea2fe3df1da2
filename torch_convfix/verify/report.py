"""What a sweep found: for a terminal, for a program, and as a page."""

import importlib.metadata
import importlib.resources
import io
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_convfix.verify.chart import error_chart
from torch_convfix.verify.findings import FAULTS, Finding, Kind
from torch_convfix.verify.workers import Ready, Settings


@dataclass(frozen=True)
class Environment:
    """Where a sweep ran."""

    device: str
    kernels: str
    dtype: str
    where: str
    versions: dict[str, str]
    graph_hash_fault: bool
    order: int = 2
    tolerance: float | None = None

    @classmethod
    def here(cls, settings: Settings, ready: Ready) -> "Environment":
        """This machine."""
        versions = {"python": platform.python_version()}
        for package in ("torch", "torch_xla", "torch_tpu", "jaxlib", "torch-convfix"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        where = "traced by TorchTPU, run on XLA:CPU" if ready.traced else platform.machine()
        return cls(
            settings.device,
            "stock" if settings.stock else "torch_convfix",
            ready.dtype,
            where,
            versions,
            ready.graph_hash_fault,
            settings.highest,
            settings.tolerance,
        )


@dataclass
class Report:
    """The result of `run`. `print` it; `ok` says whether the device is right."""

    environment: Environment
    cases: int
    compared: int  # of these, how many gave numbers to compare
    findings: list[Finding]
    skipped: dict[str, int] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    # Wrong in a process that had run other cases, and right in a new one.
    artefacts: list[str] = field(default_factory=list)
    planned: int | None = None  # cases; more than there are where the sweep has not ended
    rows: list[dict[str, Any]] = field(default_factory=list)  # what became of each case

    @property
    def complete(self) -> bool:
        """Whether the sweep has come to its end."""
        return self.planned in (None, self.cases)

    @property
    def faults(self) -> list[Finding]:
        """The findings that make it fail."""
        return [f for f in self.findings if f.kind in FAULTS]

    @property
    def apart(self) -> list[Finding]:
        """Operators that the device refuses or that cannot be traced: clear errors, told apart."""
        return [f for f in self.findings if f.kind not in FAULTS]

    @property
    def ok(self) -> bool:
        """Whether the sweep has ended, numbers were compared and there is no fault."""
        return self.complete and self.compared > 0 and not self.faults

    @property
    def warnings(self) -> list[str]:
        """What the reader should know beside the findings."""
        said = []
        if self.environment.graph_hash_fault:
            said.append(
                "This torch_xla can return wrong numbers when the tensors of one step are read one "
                "by one: two different graphs get one hash. Call torch_xla.sync() once, with all "
                "results alive, before reading any; verify does."
            )
        if self.artefacts:
            said.append(
                "Wrong in a process that had run other cases and right in a new one, so not listed "
                f"as faults; something leaks from one graph into another: {'; '.join(self.artefacts)}."
            )
        return said

    def summary(self) -> str:
        """One line."""
        e = self.environment
        found = (
            f"{len(self.faults)} fault{'s' * (len(self.faults) != 1)}"
            if self.faults
            else "no fault"
        )
        left = "" if self.complete else f"ended early, after {self.cases} of {self.planned} cases: "
        return f"{left}{found}, {self.compared} of {self.cases} cases compared on {e.device} ({e.where}), {e.dtype}, kernels: {e.kernels}"

    def uncompared(self) -> str:
        """One line: why not all cases were compared; empty if they were."""
        skipped = sum(self.skipped.values())
        random = sorted({n.split(":")[0] for n in self.skipped if n.endswith(": random")})
        said = []
        if skipped:
            ops = f", random ones of: {', '.join(random)}" if random else ""
            said.append(f"{skipped} cases skipped{ops}")
        if rest := self.cases - self.compared - skipped:
            said.append(f"{rest} without numbers: device or CPU raises, or the process ends")
        return "; ".join(said)

    def print(self, console: Console) -> None:
        """The table, and beneath it the lines, unwrapped so that each can be copied."""
        if self.faults:
            console.print(_table(self.faults))
        self.print_details(console)
        _say(console, "\n" + self.summary(), "bold green" if self.ok else "bold red")

    def print_details(self, console: Console) -> None:
        """The lines beneath the table, but for the summary."""
        if self.faults:
            _say(console, "\nTo see each, paste its line into Python:", "bold")
            for f in self.faults:
                _say(console, f.line)
        if self.apart:
            _say(console, "\nNot compared: a clear error on the device, or in tracing it", "bold")
            for op, lines in _by_op(self.apart).items():
                _say(console, f"{op}: {lines}")
        if uncompared := self.uncompared():
            _say(console, "\n" + uncompared)
        for warning in self.warnings:
            _say(console, f"\nwarning: {warning}", "yellow")

    def __str__(self) -> str:
        console = Console(width=120, file=io.StringIO(), force_terminal=False)
        self.print(console)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        as_dict = asdict(self)
        for finding, own in zip(as_dict["findings"], self.findings, strict=True):
            finding["kind"] = own.kind.name.lower()
            finding["error"] = own.error
        return {"ok": self.ok, **as_dict}

    def to_json(self) -> str:
        """Everything, as JSON; an infinite error is the string ``"inf"``."""
        return as_json(self.to_dict())

    def to_html(self) -> str:
        """One self-contained page: the faults, the chart of errors and the environment."""
        return _page([self])


@dataclass(frozen=True)
class Comparison:
    """The device's own kernels beside ours. `print` it; `ok` says whether ours are right."""

    stock: Report
    ours: Report

    @property
    def ok(self) -> bool:
        """Whether ours are right."""
        return self.ours.ok

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Each operator that either gets wrong, and how stock does and ours do, a line a fault."""
        both = (self.stock, self.ours)
        ops = dict.fromkeys(f.op for report in both for f in report.faults)
        return [(op, _faults_of(self.stock, op), _faults_of(self.ours, op)) for op in ops]

    def print(self, console: Console) -> None:
        """Both in one table, and beneath it the lines of ours."""
        table = Table()
        table.add_column("operator", no_wrap=True)
        table.add_column("stock is wrong in")
        table.add_column("ours is wrong in")
        for op, *faults in self.rows:
            table.add_row(op.removeprefix("nn.functional."), *faults)
        if table.row_count:
            console.print(table)
        self.ours.print_details(console)
        _say(console, "")
        for name, report in (("stock", self.stock), ("ours", self.ours)):
            _say(console, f"{name}: {report.summary()}", "bold green" if report.ok else "bold red")

    def to_json(self) -> str:
        """Both reports, as JSON."""
        return as_json({"stock": self.stock.to_dict(), "ours": self.ours.to_dict()})

    def to_html(self) -> str:
        """One self-contained page: the table, and a section for each report."""
        return _page([self.stock, self.ours], self.rows)


def as_json(value: dict[str, Any]) -> str:
    """The reports of `to_dict`, as JSON; an infinite error is the string ``"inf"``."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return "inf" if value == float("inf") else value

    return json.dumps(plain(value), indent=2, allow_nan=False)


def _page(reports: Sequence[Report], rows: Sequence[tuple[str, str, str]] | None = None) -> str:
    import jinja2

    template = importlib.resources.files(__package__).joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["error"] = error_text
    environment.filters["chart"] = lambda report: error_chart(report.errors, report.faults)
    return environment.from_string(template).render(
        reports=reports, rows=rows, command=" ".join(["torch-convfix", *sys.argv[1:]])
    )


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def error_text(error: float) -> str:
    """A relative error in a few characters."""
    if error == float("inf"):
        return "not finite"
    if error == 0:
        return "-"
    if 10 <= error < 1e6:
        return f"{error:.0f} times"
    return f"{error:.0%}" if 0.01 <= error < 10 else f"{error:.0e}"


def _by_op(findings: Sequence[Finding]) -> dict[str, str]:
    said: dict[str, list[str]] = {}
    for f in findings:
        said.setdefault(f.op, []).append(
            f.fault if f.kind is Kind.REFUSES else f"{f.fault} ({f.kind.value})"
        )
    return {op: ", ".join(faults) for op, faults in said.items()}


def _table(findings: Sequence[Finding]) -> Table:
    table = Table()
    table.add_column("operator", no_wrap=True)
    table.add_column("wrong")
    table.add_column("worst error", justify="right")
    table.add_column("cases", justify="right")
    for f in findings:
        op = f.op.removeprefix("nn.functional.")
        table.add_row(op, _what(f), error_text(f.error), str(f.cases))
    return table


def _what(f: Finding) -> str:
    return f"{f.kind.value}: {f.what}" if f.kind is Kind.CRASH else f.what


def _faults_of(report: Report, op: str) -> str:
    faults = [f for f in report.faults if f.op == op]
    said = (f"{_what(f)}: {error_text(f.error)}" if f.error else _what(f) for f in faults)
    return "\n".join(said) or "-"
