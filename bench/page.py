"""The benchmark table, for a terminal and for docs/benchmarks.md."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from torch_convfix.tpu.report import Failure, Report, mebibytes

Results = Mapping[tuple[str, str], Report | Failure]
WallTimes = Sequence[Mapping[str, Any]]  # what wall_time.py writes
# Of the same stack; of torch_xla for all others.
STOCK = dict.fromkeys(("ours, TorchTPU", "stock TorchTPU"), "stock TorchTPU")
# Stock torch_xla drops the derivative of max pooling's gradient, and so most of these steps.
CUT_SHORT = ("resnet50_r1", "resnext50_r1")


def _cells(result: Report | Failure) -> list[str]:
    if isinstance(result, Failure):
        return ["-", "-", "-", result.reason.strip().splitlines()[-1][:80]]
    return [
        f"{result.cycles:,}",
        f"{result.convolutions:,}",
        f"{result.compile_cpu_seconds:.1f}",
        mebibytes(result.temporary_bytes),
    ]


def _of_stock(results: Results, workload: str, name: str) -> float | None:
    beside = STOCK.get(name, "stock torch_xla")
    if beside == "stock torch_xla" and workload in CUT_SHORT:
        return None
    stock, own = results.get((workload, beside)), results[workload, name]
    if not isinstance(stock, Report) or not isinstance(own, Report):
        return None
    return own.cycles / stock.cycles


def worse(results: Results, most: float) -> list[str]:
    """What is wrong with ours: not compiled, or more cycles than ``most`` times stock."""
    found = []
    for (workload, name), result in results.items():
        if not name.startswith("ours"):
            continue
        ratio = _of_stock(results, workload, name)
        if isinstance(result, Failure):
            found.append(f"{workload}, {name}: {result.reason}")
        elif ratio is not None and ratio > most:
            found.append(f"{workload}, {name}: {ratio:.3f} times the cycles of stock")
    return found


def rows(results: Results, workloads: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Workload, contender, cycles, ratio to stock, convolutions, compile seconds, temporaries."""
    found = []
    for workload in workloads:
        for name in names:
            if (workload, name) not in results:
                continue
            cycles, convolutions, seconds, memory = _cells(results[workload, name])
            ratio = _of_stock(results, workload, name)
            of_stock = "-" if ratio is None else f"{ratio:.3f}"
            found.append([workload, name, cycles, of_stock, convolutions, seconds, memory])
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


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    lines = ["| " + " | ".join(header) + " |"]
    lines += ["|" + " --- |" * left + " ---: |" * (len(header) - left)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _wall_times(times: WallTimes) -> str:
    columns = ("rounds", "stock_ms", "ours_ms", "jax_ms", "ratio")
    rows = [[row["row"], *(_digits(row[c]) if c in row else "" for c in columns)] for row in times]
    return _markdown(["", "rounds", "stock, ms", "ours, ms", "JAX, ms", "stock / ours"], rows, 1)


TEXT = """---
hide: [toc]
---
# Benchmarks

Written by `bench/run`: do not edit. {versions}.

One step of each workload, compiled by the TPU's own compiler for one {topology}, without a TPU. Each
compilation had at most {limit:g} CPU seconds and {memory:g} GiB of memory.

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
derivative of max pooling, which `resnet50_r1` and `resnext50_r1` have, and with it most of the step:
its figures there are of a wrong result, with which nothing is compared. 'of stock' compares with stock
of the same stack, JAX with torch_xla; `bench/run` fails where ours is over 1.01. Compile seconds are
CPU seconds of all of the compiler's threads.

{failures}

## Wall time on XLA:CPU
Medians in milliseconds, in turn in one run on {cores} cores of an {machine} machine (`bench/wall_time.py`);
stock and ours are traced anew every time, JAX is not. F, I and W are the forward, the input gradient and
the weight gradient of one layer alone.

{wall_times}
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
    wall_times: WallTimes,
) -> None:
    """Write benchmarks.md and benchmarks.png into the folder."""
    folder.mkdir(exist_ok=True)
    _plot(results, workloads, names, folder / "benchmarks.png")
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
            table=_markdown(HEADER, rows(results, workloads, names), 2),
            wall_times=_wall_times(wall_times),
            cores=os.cpu_count(),
            machine=platform.machine(),
            failures="\n".join(["Not compiled:", "", *failures]) if failures else "",
        )
    )
