"""Compare the operators of convolutional nets on a device with float64 on the CPU, at every order.

Interrupted, it leaves in --json FILE what it found, and --resume goes on. Exit code 1 if any number is
wrong, any call ends the process, or a convolution raises; with --compare, it is that of ours.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torch_convfix._devices import default_device, is_installed
from torch_convfix.commands import _json
from torch_convfix.commands._options import DEVICES, add

if TYPE_CHECKING:
    from torch_convfix.verify.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torch_convfix.verify.run`, and where the report goes."""
    add(parser, "--device", DEVICES)
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module to import first; may be repeated",
    )
    add(parser, "--dtype", default="")
    add(parser, "--order", "; convolutions go one further")
    add(parser, "--cases", default=40)
    add(parser, "--seed")
    add(parser, "--tolerance")
    add(parser, "--only", "operators, as 'nn.functional.*pool*'")
    parser.add_argument(
        "--all", dest="all_ops", action="store_true", help="all of PyTorch's operator database"
    )
    add(parser, "--jobs", "; by default one a CPU, at most 4")
    add(parser, "--limit", "one case", default=180.0)
    which = parser.add_mutually_exclusive_group()
    add(which, "--stock")
    add(which, "--compare")
    add(parser, "--json", _json.HELP)
    add(parser, "--resume", "; without it, begin anew")
    add(parser, "--html")


def main(args: argparse.Namespace) -> int:
    """Sweep, print and write the report."""
    options = dict(vars(args))
    path, html, compare, stock = (options.pop(n) for n in ("json", "html", "compare", "stock"))
    resume = options.pop("resume")
    if not (is_installed("expecttest") and is_installed("numpy")):
        return _refuse("verify needs expecttest and numpy: pip install 'torch-convfix[verify]'")
    if html and not (is_installed("jinja2") and is_installed("matplotlib")):
        return _refuse("--html needs jinja2 and matplotlib: pip install 'torch-convfix[verify]'")
    names = ("stock", "ours") if compare else ("stock",) if stock else ("ours",)
    try:
        _json.check(path)
        _json.check(html)
        earlier = _earlier(path, names) if resume else {}
        options["device"] = options["device"] or default_device()
    except (ImportError, ValueError) as error:
        return _refuse(error)
    # Not before: it cannot be imported without numpy.
    from torch_convfix.verify.report import Comparison, as_json
    from torch_convfix.verify.sweep import CannotStart

    parts = dict(earlier)

    def keep(name: str, report: "Report", *, done: bool = False) -> None:
        parts[name] = report.to_dict()
        _json.write(path, as_json(parts if compare else parts[name]), done=done)

    reports = {}
    try:
        for name in names:
            reports[name] = _sweep(
                name if compare else "verify", stock=name == "stock",
                keep=partial(keep, name), resume=earlier.get(name), **options,
            )  # fmt: skip
    except CannotStart as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print(f"interrupted{'; --resume goes on' * bool(path)}", file=sys.stderr)
        return 130
    report = Comparison(**reports) if compare else reports[names[0]]
    report.print(Console(file=_json.other(path)))
    keep(names[-1], reports[names[-1]], done=True)
    if html:
        html.write_text(report.to_html())
    return 0 if report.ok else 1


def _earlier(path: Path | None, names: Sequence[str]) -> dict[str, Any]:
    """The reports of an earlier sweep by the kernels of each."""
    if not path:
        raise ValueError("--resume needs the --json FILE that it goes on from")
    if not path.exists():
        return {}
    try:
        earlier = json.loads(path.read_text())
        parts = (
            {n: earlier[n] for n in names if n in earlier}
            if len(names) > 1
            else {names[0]: earlier}
        )
        for part in parts.values():
            part["environment"], part["rows"], part["findings"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a report of such a sweep") from error
    return parts


def _refuse(reason: object) -> int:
    print(reason, file=sys.stderr)
    return 2


def _sweep(title: str, **options: object) -> "Report":
    from torch_convfix.verify.sweep import run

    def line(done: int, of: int, op: str) -> None:
        if done * 10 // of > (done - 1) * 10 // of:  # each tenth
            print(f"{title}: {done} of {of} cases, {op}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    if not console.is_terminal:  # where rich's bar would print nothing
        return run(progress=line, **options)  # type: ignore[arg-type]
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[op]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, op="starting")
        return run(
            progress=lambda done, of, op: bar.update(task, completed=done, total=of, op=op),
            **options,  # type: ignore[arg-type]
        )
