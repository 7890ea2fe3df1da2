"""What a run of the zoo found: for a terminal, and docs/zoo.md."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from derivatives import ROWS
from libraries import LIBRARIES
from member import RIGHT, VERDICTS, WRONG
from rich.table import Table

from torch_convfix.verify.report import error_text

Member = Sequence[Mapping[str, Any]]


def cell(row: Mapping[str, Any]) -> str:
    """A row in a word."""
    if row["verdict"] == WRONG:
        return f"wrong by {error_text(row['error'])}"
    return row["verdict"]


def counts(members: Iterable[Member]) -> Counter[str]:
    """How many rows have each verdict."""
    return Counter(row["verdict"] for rows in members for row in rows)


def summary(members: Iterable[Member]) -> str:
    """The same in words."""
    found = counts(members)
    said = ", ".join(f"{found[v]} {v}" for v in VERDICTS if v in found)
    return f"{sum(found.values())} rows: {said}"


def table(members: Mapping[str, Member], kernels: str) -> Table:
    """For a terminal: the rows that are not right each with its detail below."""
    made = Table(box=None, title=f"kernels: {kernels}")
    for column in ("member", "row", "verdict", "error", "detail"):
        made.add_column(column, overflow="fold")
    for name, rows in members.items():
        for row in rows:
            made.add_row(name, row["row"], cell(row), f"{row['error']:.1e}", row["detail"])
    return made


TEXT = """---
hide: [toc]
---
# The zoo

Written by `scripts/zoo --write`: do not edit.

torchvision's networks as they come (in-place activations, batch statistics; dropout off), without
weights, and the call that libraries of this kind are used for, on a small net: on the device, stock and
ours, against float64 on the CPU. The batch is 2, images are as small as leaves 2 x 2 positions before
the end: XLA:CPU takes minutes to compile a second derivative, whatever the image. For the same reason
only the smallest networks have all rows, and "\u2013" is a row that was not run.

A row is right within 1e-6 of the largest number of a result, or of a tenth of the row's largest. "Not
traceable": TorchTPU ends the process that traces it without a TPU. "The CPU raises too": PyTorch has no
such derivative on any device; ours has, and is then compared with the CPU after `enable("cpu")`.

<!-- skip: next, the whole zoo takes an hour -->
```sh
./scripts/zoo --quick                 # the fifteen rows of CI
./scripts/zoo --stack torch_tpu       # all, traced by TorchTPU and run on XLA:CPU
./scripts/zoo --only 'resnet*' --stock
```

curvlinops' KFAC knows parameters by `data_ptr()`, which is 0 for every tensor on XLA, and asks for a
random generator that torch_xla does not have: no derivative is to blame. learn2learn 0.2.0 does not build
with a Cython of today, so it is not in `requirements/zoo.lock`.

Each member runs in a process of its own, with limits on CPU time and memory, and after a death each row
in its own: a death is a row.
"""


def _section(stack: str, runs: Mapping[str, Any], order: Sequence[str]) -> str:
    versions = next(iter(runs.values()))["versions"]
    lines = [f"## {stack}", "", ", ".join(f"{p} {v}" for p, v in versions.items()) + ".", ""]
    lines += [f"- {kernels}: {summary(run['members'].values())}" for kernels, run in runs.items()]
    for rows, header in ((["call"], "library"), (list(ROWS), "network")):
        lines += ["", f"| {header} | " + " | ".join(rows) + " |", "| --- " * (len(rows) + 1) + "|"]
        for name in order:
            if (name in LIBRARIES) != (header == "library"):
                continue
            if any(name in run["members"] for run in runs.values()):
                cells = [_beside(name, row, runs) for row in rows]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
    said: dict[str, list[str]] = {}
    for kernels, run in runs.items():
        for name, rows in run["members"].items():
            for row in rows:
                if row["detail"] and row["verdict"] not in (RIGHT, WRONG):
                    said.setdefault(row["detail"], []).append(f"{kernels}, {name}, {row['row']}")
    root = f"{Path(__file__).resolve().parents[1]}/"
    notes = [
        f"- `{detail.replace(root, '').replace('`', '')}`: {'; '.join(where)}"
        for detail, where in said.items()
    ]
    if notes:
        lines += ["", "<details><summary>What was said</summary>", "", *notes, "", "</details>"]
    return "\n".join(lines)


def _beside(name: str, row: str, runs: Mapping[str, Any]) -> str:
    """Stock and ours in one cell, or in one word where they agree."""
    said = {}
    for kernels, run in runs.items():
        found = [r for r in run["members"].get(name, ()) if r["row"] == row]
        said[kernels] = cell(found[0]) if found else "\u2013"
    if len({*said.values()}) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{kernels}: {text}" for kernels, text in said.items())


def write(folder: Path, file: Path, order: Sequence[str]) -> int:
    """Write the page from the files of the runs; 2 if there is none."""
    sections = []
    for stack in ("torch_xla", "torch_tpu"):
        files = {k: folder / f"{stack}-{k}.json" for k in ("stock", "ours")}
        runs = {k: json.loads(f.read_text()) for k, f in files.items() if f.exists()}
        if runs:
            sections.append(_section(stack, runs, order))
    if not sections:
        print(f"no results in {folder}: run scripts/zoo first", file=sys.stderr)
        return 2
    file.write_text("\n".join([TEXT, "\n\n".join(sections), ""]))
    return 0
