"""Whole networks and libraries on a device against float64 on the CPU, at first and second order.

A row is a derivative of a network, or the typical call of a library; the rows of one member share a
process, and after it died each has its own. Exit code 1 where a row is wrong, raises or dies, 2 if it
cannot start.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import libraries
import members
import page
from member import DIES, NO_FAULT, NOT_TRACEABLE, RIGHT, Row, rows_of
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torch_convfix._process import ENDED, run_limited, tail
from torch_convfix.commands._options import Formatter, add
from torch_convfix.verify.workers import Settings, environment

ROOT = Path(__file__).resolve().parents[1]
MEMBER = ROOT / "zoo/member.py"
MEMBERS = (*libraries.installed(), *members.NETS)
# The libraries, and the penalty of the networks that people try first.
QUICK = dict.fromkeys((n for n in MEMBERS if n in libraries.LIBRARIES), (libraries.CALL,))
QUICK |= dict.fromkeys(
    (
        "squeezenet1_1",
        "mobilenet_v3_small",
        "shufflenet_v2_x0_5",
        "resnet18",
        "alexnet",
        "googlenet",
    ),
    ("R1 penalty",),
)
DEVICES = {"torch_xla": "xla", "torch_tpu": "tpu"}
KERNELS = ("ours", "stock")
PACKAGES = ("torch", "torch_xla", "torch_tpu", "jaxlib", "torchvision", "torch-convfix")

Member = list[dict[str, Any]]


def run_member(
    name: str,
    rows: Sequence[str],
    device: str,
    kernels: str,
    limit: float,
    memory: int,
    program: Path = MEMBER,
) -> Member:
    """Its rows, in one process; each in its own where that one dies or is over a limit."""
    found = _run(name, device, kernels, rows, limit * len(rows), memory, program)
    if len(rows) > 1 and found[0]["verdict"] in (DIES, NOT_TRACEABLE):
        found = [
            row for r in rows for row in _run(name, device, kernels, [r], limit, memory, program)
        ]
    return found


def _run(
    name: str,
    device: str,
    kernels: str,
    rows: Sequence[str],
    limit: float,
    memory: int,
    program: Path,
) -> Member:
    env = {"PJRT_DEVICE": "CPU", **environment(Settings(device))}
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "rows"), Path(folder, "log")
        command = [sys.executable, str(program), name, device, kernels, str(file), *rows]
        # In time four times as much: one that waits for ever uses no CPU.
        reason = run_limited(command, log, env, limit=4 * limit, cpu_limit=limit, memory=memory)
        if not reason:
            return [json.loads(line) for line in file.read_text().splitlines()]
        # Only the tracing runs TorchTPU's code.
        verdict = NOT_TRACEABLE if device == "tpu" and reason.startswith(ENDED) else DIES
        detail = f"{reason}: {tail(log, 1)}"
        return [asdict(Row(row, verdict, detail=detail)) for row in rows]


def _versions() -> dict[str, str]:
    lock = (ROOT / "requirements/zoo.lock").read_text().splitlines()
    packages = [*PACKAGES, *(line.split("==")[0] for line in lock if "==" in line)]
    found = {_plain(d.name): d.version for d in importlib.metadata.distributions()}
    return {p: found[_plain(p)] for p in packages if _plain(p) in found}


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _kept(file: Path, chosen: Mapping[str, Collection[str]]) -> dict[str, Member]:
    """The rows of an earlier run, but for those to run again: chosen, and not right."""
    if not file.exists():
        return {}
    earlier = json.loads(file.read_text())["members"]
    return {
        n: [r for r in rows if r["verdict"] == RIGHT or r["row"] not in chosen.get(n, ())]
        for n, rows in earlier.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the members, keep what is known after each, print the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/zoo", description=__doc__, formatter_class=Formatter
    )
    add(parser, "--stack", default="torch_xla")
    add(parser, "--only", "members, as 'resnet*'")
    add(parser, "--quick", f", of {len(QUICK)} rows")
    add(parser, "--stock")
    add(parser, "--json", ", which grows by member; by default out/zoo/STACK-KERNELS.json")
    add(parser, "--resume", ", and run again what was not right")
    add(parser, "--cpu-limit", "one row", default=300.0)
    add(parser, "--memory", "one process", default=8.0)
    add(parser, "--jobs", default=1)
    parser.add_argument(
        "--write", action="store_true", help="only write docs/zoo.md, from the files in out/zoo"
    )
    args = parser.parse_args(argv)
    if args.write:
        return page.write(ROOT / "out/zoo", ROOT / "docs/zoo.md", MEMBERS)
    rows = dict(QUICK) if args.quick else {name: rows_of(name) for name in MEMBERS}
    chosen = {name: r for name, r in rows.items() if fnmatchcase(name, args.only)}
    if not chosen:
        print(f"--only must match a member, as 'resnet*' does, got {args.only!r}", file=sys.stderr)
        return 2
    kernels = "stock" if args.stock else "ours"
    file = args.json or ROOT / f"out/zoo/{args.stack}-{kernels}.json"
    if args.json and not file.absolute().parent.is_dir():
        print(f"no folder for {file}", file=sys.stderr)
        return 2
    file.parent.mkdir(parents=True, exist_ok=True)
    found = _kept(file, chosen) if args.resume else {}

    def keep() -> None:
        report = {"stack": args.stack, "kernels": kernels, "versions": _versions()}
        report["members"] = {n: found[n] for n in MEMBERS if found.get(n)}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1))
        partial.replace(file)

    console = Console(stderr=True)
    columns = (TextColumn("zoo"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True) as bar,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        done = {n: {row["row"] for row in rows} for n, rows in found.items()}
        left = {n: [r for r in rows if r not in done.get(n, ())] for n, rows in chosen.items()}
        todo = [n for n, rows in left.items() if rows]
        task = bar.add_task("zoo", total=len(todo))
        memory = int(args.memory * 2**30)

        def one(name: str) -> tuple[str, Member, float]:
            start = time.monotonic()
            made = run_member(
                name, left[name], DEVICES[args.stack], kernels, args.cpu_limit, memory
            )
            return name, made, time.monotonic() - start

        for name, rows, seconds in pool.map(one, todo):
            found[name] = found.get(name, []) + rows
            keep()
            bar.advance(task)
            if not console.is_terminal:
                said = ", ".join(f"{count} {v}" for v, count in page.counts([rows]).items())
                print(f"zoo: {name}, {seconds:.0f} s: {said}", file=sys.stderr, flush=True)
    shown: Mapping[str, Member] = {
        n: [row for row in found[n] if row["row"] in rows] for n, rows in chosen.items()
    }
    Console(width=None if sys.stdout.isatty() else 160).print(page.table(shown, kernels))
    print(page.summary(shown.values()))
    return int(bool({*page.counts(shown.values())} - NO_FAULT))


if __name__ == "__main__":
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    sys.exit(main())
