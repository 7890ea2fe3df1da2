"""The benchmark table, for a terminal and for docs/benchmarks.md."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from torch_convfix.tpu.report import Failure, Report, mebibytes

Results = Mapping[tuple[str, str], Report | Failure]
STOCK = "stock torch_xla"


def _cells(result: Report | Failure) -> list[str]:
    if isinstance(result, Failure):
        return ["-", "-", "-", result.reason.strip().splitlines()[-1][:80]]
    return [
        f"{result.cycles:,}",
        f"{result.convolutions:,}",
        f"{result.compile_cpu_seconds:.1f}",
        mebibytes(result.temporary_bytes),
    ]


def _ratio(results: Results, workload: str, name: str) -> str:
    stock, own = results.get((workload, STOCK)), results[workload, name]
    if not isinstance(stock, Report) or not isinstance(own, Report):
        return "-"
    return f"{own.cycles / stock.cycles:.3f}"


def rows(results: Results, workloads: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Workload, contender, cycles, ratio to stock, convolutions, compile seconds, temporaries."""
    found = []
    for workload in workloads:
        for name in names:
            if (workload, name) not in results:
                continue
            cycles, convolutions, seconds, memory = _cells(results[workload, name])
            ratio = _ratio(results, workload, name)
            found.append([workload, name, cycles, ratio, convolutions, seconds, memory])
    return found


HEADER = [
    "workload",
    "contender",
    "cycles, estimated",
    "of stock",
    "convolutions",
    "compile, CPU s",
    "temporaries, MiB",
]


def table(results: Results, workloads: Sequence[str], names: Sequence[str]) -> Table:
    """For a terminal."""
    made = Table(box=None)
    for i, column in enumerate(HEADER):
        made.add_column(column, justify="left" if i < 2 else "right")
    for row in rows(results, workloads, names):
        made.add_row(*row)
    return made


def _plot(results: Results, workloads: Sequence[str], names: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [
            r.cycles if isinstance(r := results.get((w, name)), Report) else 0 for w in workloads
        ]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(workloads))]
        axes.bar(places, heights, width, label=name)
    axes.set_yscale("log")
    axes.set_ylabel("cycles, estimated")
    axes.set_xticks(range(len(workloads)), workloads, rotation=30, ha="right")
    axes.legend(fontsize="small", ncols=3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


TEXT = """# Benchmarks

Written by `bench/run`: do not edit. {versions}.

One step of each workload, compiled by the TPU's own compiler for one {topology}, without a TPU. Each
compilation had at most {limit:g} s and {memory:g} GiB of memory.

**What the cycles are.** The sum of the compiler's `estimated_cycles` over all instructions of the
program: its static cost model, by which it chooses layouts and tilings. **What they are not.** No
TPU has run any of this. The estimate knows nothing of transfers that overlap with computation, of
other cores or of the host; it is no time, and a ratio of two estimates is not a measured speed-up.
It depends on the program and the compiler alone: {repeat}.

![Cycles by workload]({plot})

{table}

`gp` is a gradient-penalty step of one layer, `fb` its forward and backward, `r1` a whole torchvision
model with a penalty on the gradient with respect to the image, batch 32, without dropout; `wgan_gp`
a step of DCGAN's networks with a gradient penalty, `maml` a second-order step of a four-layer net.
'ours, merged' is `enable("xla", grouped="merge")`. Stock torch_xla drops a term of the second
derivative of max pooling, which `resnet50_r1` and `resnext50_r1` have: its figures there are of a
wrong result. Compile seconds are CPU seconds of all of the compiler's threads.

{failures}
"""


def write(
    results: Results,
    workloads: Sequence[str],
    names: Sequence[str],
    topology: str,
    memory: float,
    limit: float,
    folder: Path,
    repeat: str,
) -> None:
    """Write benchmarks.md and benchmarks.png into the folder."""
    folder.mkdir(exist_ok=True)
    _plot(results, workloads, names, folder / "benchmarks.png")
    lines = ["| " + " | ".join(HEADER) + " |", "| --- | --- |" + " ---: |" * (len(HEADER) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results, workloads, names)]
    failures = [
        f"- `{workload}`, {name}: {r.reason.strip().splitlines()[-1]}"
        for (workload, name), r in results.items()
        if isinstance(r, Failure)
    ]
    packages = ("torch", "torch_xla", "jax", "libtpu")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    (folder / "benchmarks.md").write_text(
        TEXT.format(
            versions=versions,
            topology=topology,
            memory=memory,
            limit=limit,
            repeat=repeat,
            plot="benchmarks.png",
            table="\n".join(lines),
            failures="\n".join(["Not compiled:", "", *failures]) if failures else "",
        )
    )
