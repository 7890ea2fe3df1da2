"""Compile a step for TPUs that are not there, with the TPU's own compiler, and say what it costs."""

import argparse
import sys

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from torch_convfix import _target
from torch_convfix.commands import _json
from torch_convfix.commands._options import COUNT, add
from torch_convfix.tpu import _chips, _job, _step, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``torch-convfix tpu``."""
    parser.add_argument("target", help=_target.HELP)
    add(parser, "--input")
    add(parser, "--topology", f"; several with commas between; known: {', '.join(_chips.CHIPS)}")
    add(
        parser, "--stack", ", or JAX, traces it; by default what is installed", choices=_step.STACKS
    )
    parser.add_argument(
        "--grouped", choices=("direct", "merge"), default="direct", help="how grouped layers run"
    )
    add(parser, "--compare")
    add(parser, "--json", _json.HELP)
    add(parser, "--html")
    parser.add_argument("--operators", type=COUNT, default=12, metavar="N", help="how many to list")
    add(parser, "--limit", "one compilation")
    add(parser, "--memory", "one compilation")


def main(args: argparse.Namespace) -> int:
    """Compile, print, write; 1 where anything did not compile, 2 where the target is no step."""
    try:
        # What needs no compiler is refused before one starts.
        stack = args.stack or _step.default_stack()
        _target.check_name(args.target)
        for topology in args.topology.split(","):
            _chips.topology_name(topology)
        for text in args.input:
            _target.parse_input(text)
        _json.check(args.json)
        _json.check(args.html)
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    variants = ["stock"] if args.compare and stack != "jax" else []
    variants.append("ours")
    if args.grouped == "merge" and stack == "torch_xla":
        variants[-1:] = ["ours", "merged"] if args.compare else ["merged"]
    jobs = [
        _job.Job(args.target, tuple(args.input), topology, stack, kernels)
        for topology in args.topology.split(",")
        for kernels in variants
    ]
    memory = int(args.memory * 2**30) if args.memory else None
    results = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for job in jobs:
            task = progress.add_task(f"{job.name} for {job.topology}, {job.kernels}", total=1)
            results.append(_job.run(job, limit=args.limit, memory=memory))
            progress.update(task, completed=1)
            _json.write(args.json, report.to_json(results), done=len(results) == len(jobs))
    Console(file=_json.other(args.json)).print(report.render(results, args.operators))
    if args.html:
        args.html.write_text(report.to_html(results))
    failures = [r for r in results if isinstance(r, report.Failure)]
    return 2 if any(not f.usable for f in failures) else int(bool(failures))
