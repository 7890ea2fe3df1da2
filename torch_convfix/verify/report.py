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
        """Whether numbers were compared and there is no fault."""
        return self.compared > 0 and not self.faults

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
        return f"{found}, {self.compared} of {self.cases} cases compared on {e.device} ({e.where}), {e.dtype}, kernels: {e.kernels}"

    def print(self, console: Console) -> None:
        """The table, and beneath it the lines, unwrapped so that each can be copied."""

        def say(text: str, style: str = "") -> None:
            console.print(Text(text, style=style), soft_wrap=True)

        if self.faults:
            console.print(_table(self.faults))
            say("\nTo see each, paste its line into Python:", "bold")
            for f in self.faults:
                say(f.line)
        if self.apart:
            say("\nNot compared: a clear error on the device, or in tracing it", "bold")
            for op, lines in _by_op(self.apart).items():
                say(f"{op}: {lines}")
        if self.skipped:
            say("\n" + skipped_line(self.skipped))
        for warning in self.warnings:
            say(f"\nwarning: {warning}", "yellow")
        say("\n" + self.summary(), "bold green" if self.ok else "bold red")

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

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {k: plain(v) for k, v in value.items()}
            if isinstance(value, list):
                return [plain(v) for v in value]
            return "inf" if value == float("inf") else value

        return json.dumps(plain(self.to_dict()), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """One self-contained page: the faults, the chart of errors and the environment."""
        import jinja2

        template = importlib.resources.files(__package__).joinpath("report.html.j2").read_text()
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters["error"] = error_text
        return environment.from_string(template).render(
            report=self,
            chart=error_chart(self.errors, self.faults),
            command=" ".join(["torch-convfix", *sys.argv[1:]]),
            skipped=skipped_line(self.skipped),
        )


def error_text(error: float) -> str:
    """A relative error in a few characters."""
    if error == float("inf"):
        return "not finite"
    if error == 0:
        return "-"
    return f"{error:.0%}" if 0.01 <= error < 10 else f"{error:.0e}"


def skipped_line(skipped: dict[str, int]) -> str:
    """How many were skipped, and which operators are random."""
    random = sorted({name.split(":")[0] for name in skipped if name.endswith(": random")})
    said = f"{sum(skipped.values())} cases skipped"
    return said + (f", random ones of: {', '.join(random)}" if random else "")


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
        what = f"{f.kind.value}: {f.what}" if f.kind is Kind.CRASH else f.what
        table.add_row(f.op.removeprefix("nn.functional."), what, error_text(f.error), str(f.cases))
    return table
