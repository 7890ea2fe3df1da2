"""Compare the operators of convolutional nets on a device with float64 on the CPU, at every order.

Exit code 1 if any number is wrong, any call ends the process, or a convolution raises.
"""

import argparse
import pathlib

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torch_convfix.verify.report import Report, error_text
from torch_convfix.verify.sweep import run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `torch_convfix.verify.run`, and where the report goes."""
    add = parser.add_argument
    add("--device", default="xla", help="xla, cpu, cuda, tpu (traced if there is none) or a backend")
    add("--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="a module to import first; may be repeated")  # fmt: skip
    add("--dtype", default="", help="of the inputs, as float32")
    add("--orders", type=int, default=2, help="highest order; convolutions go one further")
    add("--cases", type=int, default=40, help="how many random convolutions")
    add("--seed", type=int, default=0, help="of the random convolutions")
    add("--tolerance", type=float, help="relative error from which a result is wrong")
    add("--only", default="*", metavar="PATTERN", help="operators to take, as 'nn.functional.*pool*'")
    add("--all", dest="all_ops", action="store_true", help="all of PyTorch's operator database")
    add("--jobs", type=int, help="processes at a time")
    add("--timeout", type=float, default=180.0, help="seconds a case may take")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stock", action="store_true", help="with the device's own kernels")
    which.add_argument("--compare", action="store_true", help="stock beside ours")
    add("--json", type=pathlib.Path, metavar="FILE", help="write the report as JSON")
    add("--html", type=pathlib.Path, metavar="FILE", help="write the report as a page")


def main(args: argparse.Namespace) -> int:
    """Sweep, print and write the report."""
    options = dict(vars(args))
    json, html, compare, stock = (options.pop(n) for n in ("json", "html", "compare", "stock"))
    console = Console()
    before = _sweep(console, "stock", stock=True, **options) if compare else None
    report = _sweep(console, "verify", stock=stock, **options)
    if before:
        console.print(_comparison(before, report))
    else:
        report.print(console)
    if json:
        json.write_text(report.to_json())
    if html:
        html.write_text(report.to_html())
    return 0 if report.ok else 1


def _sweep(console: Console, title: str, **options: object) -> Report:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[op]}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, op="starting")
        return run(
            progress=lambda done, of, op: bar.update(task, completed=done, total=of, op=op),
            **options,  # type: ignore[arg-type]
        )


def _comparison(stock: Report, ours: Report) -> Table:
    table = Table(title=f"stock: {stock.summary()}\nours: {ours.summary()}", title_justify="left")
    for column in ("operator", "stock is wrong in", "by", "ours is wrong in", "by"):
        table.add_column(column)
    ops = dict.fromkeys(f.op for report in (stock, ours) for f in report.faults)
    for op in ops:
        cells = []
        for report in (stock, ours):
            own = [f for f in report.faults if f.op == op]
            cells += ["\n".join(f.what for f in own) or "-", "\n".join(error_text(f.error) for f in own)]
        table.add_row(op, *cells)
    return table
