"""What the TPU compiler says of one step, for a terminal, a program and a browser."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources

from rich.console import Console, Group, RenderableType
from rich.table import Table

from torch_convfix.tpu import _chips
from torch_convfix.tpu._compiler import Costs, Instruction
from torch_convfix.tpu._origin import Origin

ESTIMATE = (
    "Cycles are the compiler's static estimate, summed over the instructions: no TPU has run this. "
    "They compare programs for one chip; they are no time."
)


@dataclass(frozen=True)
class Operator:
    """The instructions of one operator: all of one origin and kind."""

    stage: str
    name: str
    source: str
    cycles: int
    instructions: int


@dataclass(frozen=True)
class Report(Costs):
    """One step, compiled for one device of one topology; `memory_bytes` is what the device has."""

    name: str
    stack: str
    kernels: str
    topology: str
    convolutions: int
    trace_seconds: float
    memory_bytes: int | None
    operators: tuple[Operator, ...]

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in flops a byte of `bytes`."""
        return self.flops / max(self.bytes, 1)

    @property
    def bound_seconds(self) -> float | None:
        """The roofline bound: no device is faster than its peak at these flops, nor than its memory
        at reading the arguments and writing the results once (Williams et al., 2009,
        https://doi.org/10.1145/1498765.1498785)."""
        chip = _chips.find(self.topology)
        if chip is None:
            return None
        return max(
            self.flops / chip.peak_flops,
            (self.argument_bytes + self.output_bytes) / chip.bandwidth,
        )

    @property
    def ratio_to_bound(self) -> float | None:
        """Estimated cycles over those of the bound, where the chip's clock is public."""
        chip, bound = _chips.find(self.topology), self.bound_seconds
        if chip is None or chip.clock_hz is None or not bound:
            return None
        return self.cycles / (bound * chip.clock_hz)

    def to_dict(self) -> dict[str, object]:
        """Everything, for `json`."""
        return {
            **asdict(self),
            "intensity": self.intensity,
            "bound_seconds": self.bound_seconds,
            "ratio_to_bound": self.ratio_to_bound,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "Report":
        """The inverse of `to_dict`."""
        own = {name: values[name] for name in cls.__dataclass_fields__}
        own["operators"] = tuple(Operator(**o) for o in values["operators"])  # type: ignore[attr-defined]
        return cls(**own)  # type: ignore[arg-type]

    def __str__(self) -> str:
        console = Console(width=110)
        with console.capture() as capture:
            console.print(render([self]))
        return capture.get().rstrip()


@dataclass(frozen=True)
class Failure:
    """A step that did not compile: why, in the compiler's words where it is the compiler's.

    ``usable`` is false where the target is no step: nothing was traced.
    """

    name: str
    stack: str
    kernels: str
    topology: str
    reason: str
    usable: bool = True


def make_report(
    costs: Costs,
    instructions: Sequence[Instruction],
    stablehlo: str,
    origins: Mapping[str, Origin],
    *,
    name: str,
    stack: str,
    kernels: str,
    topology: str,
    trace_seconds: float,
) -> Report:
    """Group the instructions by origin and operator."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for instruction in instructions:
        scope, _, op = instruction.op_name.rpartition("/")
        labels = (scope.split("/")[-1].split(".")[0], instruction.source.split(":")[0])
        found = [origins[label] for label in labels if label in origins]
        origin = found[0] if found else Origin("", instruction.source)
        op = op.removeprefix("aten__") or f"({instruction.opcode})"
        source = "" if origin.source.startswith("<frozen") else origin.source  # runpy's own line
        groups[origin.stage, op, source].append(instruction.cycles)
    operators = [
        Operator(stage, op, source, sum(cycles), len(cycles))
        for (stage, op, source), cycles in groups.items()
    ]
    chip = _chips.find(topology)
    return Report(
        **asdict(costs),
        name=name,
        stack=stack,
        kernels=kernels,
        topology=topology,
        convolutions=stablehlo.count("stablehlo.convolution"),
        trace_seconds=trace_seconds,
        memory_bytes=chip.memory if chip else None,
        operators=tuple(sorted(operators, key=lambda o: -o.cycles)),
    )


def mebibytes(count: int) -> str:
    """A size in MiB."""
    return f"{count / 2**20:,.1f}"


def _summary(reports: Sequence[Report]) -> Table:
    table = Table(title=f"{reports[0].name}, estimated", title_justify="left", box=None)
    names = [
        "convolutions",
        "trace, s",
        "compile, s",
        "compile, CPU s",
        "cycles, estimated",
        "flops",
        "bytes",
        "flops a byte",
        "temporaries, MiB",
        "peak, MiB",
        "of memory",
        "roofline bound, µs",
        "estimate / bound",
    ]
    table.add_column("")
    for r in reports:
        table.add_column(f"{r.topology}\n{r.stack}\n{r.kernels}", justify="right")
    columns = []
    for r in reports:
        bound, ratio = r.bound_seconds, r.ratio_to_bound
        columns.append(
            [
                f"{r.convolutions:,}",
                f"{r.trace_seconds:.1f}",
                f"{r.compile_seconds:.1f}",
                f"{r.compile_cpu_seconds:.1f}",
                f"{r.cycles:,}",
                f"{r.flops:,}",
                f"{r.bytes:,}",
                f"{r.intensity:.2f}",
                mebibytes(r.temporary_bytes),
                mebibytes(r.peak_bytes),
                f"{r.peak_bytes / r.memory_bytes:.1%}" if r.memory_bytes else "-",
                f"{bound * 1e6:,.1f}" if bound is not None else "-",
                f"{ratio:.2f}" if ratio is not None else "-",
            ]
        )
    for name, *cells in zip(names, *columns, strict=True):
        table.add_row(name, *cells)
    return table


def _operators(report: Report, most: int) -> Table:
    title = f"{report.topology}, {report.stack}, {report.kernels}: cycles by operator, estimated"
    table = Table(title=title, title_justify="left", box=None)
    for column in ("cycles", "share", "pass", "operator", "line"):
        numbers = column in ("cycles", "share")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for o in report.operators[:most]:
        share = f"{o.cycles / max(report.cycles, 1):.1%}"
        line = o.source.rpartition("/")[2]  # all of the path is in the JSON and the page
        table.add_row(f"{o.cycles:,}", share, o.stage or "-", o.name, line or "-")
    rest = report.operators[most:]
    if rest:
        cycles = sum(o.cycles for o in rest)
        share = f"{cycles / max(report.cycles, 1):.1%}"
        table.add_row(f"{cycles:,}", share, "", f"{len(rest)} more", "")
    return table


def render(results: Sequence[Report | Failure], most: int = 12) -> RenderableType:
    """Terminal tables: one that sets the reports side by side, then one each."""
    reports = [r for r in results if isinstance(r, Report)]
    failures = [
        f"{r.topology}, {r.stack}, {r.kernels}: {r.reason}"
        for r in results
        if isinstance(r, Failure)
    ]
    parts: list[RenderableType] = []
    if reports:
        parts = [_summary(reports), *(_operators(r, most) for r in reports), ESTIMATE]
    return Group(*parts, *failures)


def to_json(results: Sequence[Report | Failure]) -> str:
    """A JSON list."""
    return json.dumps(
        [r.to_dict() if isinstance(r, Report) else asdict(r) for r in results], indent=1
    )


def to_html(results: Sequence[Report | Failure]) -> str:
    """A page of its own with a bar chart of cycles by pass and operator. Needs jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("an HTML report needs jinja2: `pip install jinja2`") from error
    source = resources.files("torch_convfix.tpu").joinpath("report.html.j2").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["mebibytes"] = mebibytes
    reports = [r for r in results if isinstance(r, Report)]
    return environment.from_string(source).render(
        reports=reports,
        failures=[r for r in results if isinstance(r, Failure)],
        longest=max((o.cycles for r in reports for o in r.operators), default=1) or 1,
        most_cycles=max((r.cycles for r in reports), default=1) or 1,
        chips={r.topology: _chips.find(r.topology) for r in reports},
        estimate=ESTIMATE,
    )
