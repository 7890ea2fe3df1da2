"""Wall time, stock, ours and JAX in turn in one run: medians and ratios.

    python bench/wall_time.py [--device xla|cpu] [--rounds 5] [--seconds 3] [--stop-after 60]
                              [--only PATTERN] [--json FILE]

`xla` is torch_xla on XLA:CPU, `cpu` plain PyTorch; JAX, on XLA:CPU, joins in the steps of bench/run.

Each figure is one traced and executed call, compiled beforehand; `trace` is the part until the
results are asked for. Shapes are those of the layers named; W, I and F are the weight gradient, the
input gradient and the forward of one layer alone; `_gp` is a gradient-penalty step, `_fb` a forward
and backward.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # TorchTPU would look for a TPU's host for minutes
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax_steps
import layers
import torch
import torch_steps
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import torch_convfix
from torch_convfix.commands._options import AMOUNT, Formatter, add
from torch_convfix.functional import conv_forward, conv_input_grad, conv_weight_grad

Step = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Row:
    """A step, tensors without data of its inputs' sizes, and the step in JAX."""

    step: Step
    inputs: Sequence[Tensor]
    in_jax: Callable[..., Any] | None = None


def workload(name: str) -> Row:
    """One of those that bench/run compiles."""
    with torch.device("meta"):  # only the sizes are used
        step, inputs = getattr(torch_steps, name)()
        in_jax, _ = getattr(jax_steps, name)()
    return Row(step, inputs, in_jax)


def layer_alone(which: str, x: Sequence[int], w: Sequence[int], **layer) -> Row:
    inputs = [torch.empty(size, device="meta") for size in (x, w)]
    return Row(alone(which, **layer), inputs)


def alone(which: str, **layer) -> Step:
    def step(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        if which == "F":
            return [conv_forward(x, w, **layer)]
        with torch.device("meta"):
            size = conv_forward(torch.empty(x.shape), torch.empty(w.shape), **layer).shape
        g = torch.full(size, 0.5, device=x.device)
        if which == "I":
            return [conv_input_grad(g, w, x.shape, **layer)]
        return [conv_weight_grad(x, g, w.shape, **layer)]

    return step


def _rows() -> dict[str, Row]:
    half = {"stride": 2, "padding": 1}
    same = {"stride": 1, "padding": 1}
    tr = {**half, "output_padding": 1, "transposed": True}
    names = (*layers.PENALTIES, *layers.FORWARD_BACKWARDS, "wgan_gp", "maml")
    of = layer_alone
    table = {
        **{name: workload(name) for name in names},
        "W grouped 128/32 28x28": of("W", [4, 128, 28, 28], [128, 4, 3, 3], **same, groups=32),
        "W grouped 512/32 14x14": of("W", [4, 512, 14, 14], [512, 16, 3, 3], **same, groups=32),
        "W transposed 64/4 28x28": of("W", [4, 64, 28, 28], [64, 16, 3, 3], **tr, groups=4),
        "W depthwise x2 96 28x28": of("W", [4, 96, 28, 28], [192, 1, 3, 3], **same, groups=96),
        "W dense 128 28x28": of("W", [4, 128, 28, 28], [128, 128, 3, 3], **same),
        "W dense 3-d 16 16^3": of("W", [2, 16, 16, 16, 16], [16, 16, 3, 3, 3], **same),
        "I grouped 3-d 16/4 16^3": of("I", [2, 16, 16, 16, 16], [16, 4, 3, 3, 3], **same, groups=4),
    }
    for k in (3, 5, 7):
        for which in "FIW":
            layer = {"stride": 1, "padding": k // 2, "groups": 64}
            name = f"{which} depthwise 64 {k}x{k} 32x32"
            table[name] = of(which, [8, 64, 32, 32], [64, 1, k, k], **layer)
    for which in "FIW":
        table |= {
            f"{which} depthwise 96 s2 56x56": of(
                which, [8, 96, 56, 56], [96, 1, 3, 3], **half, groups=96
            ),
            f"{which} depthwise small 8 8x8": of(
                which, [1, 8, 8, 8], [8, 1, 3, 3], **same, groups=8
            ),
            f"{which} depthwise 1024 7x7": of(
                which, [4, 1024, 7, 7], [1024, 1, 3, 3], **same, groups=1024
            ),
        }
    return table


Taken = tuple[float, float]  # seconds, and how many of them until the results are asked for


def _time(step: Step, inputs: Sequence[Tensor], sync: Callable[[], None] | None) -> Taken:
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    start = time.perf_counter()
    results = step(*inputs)
    traced = time.perf_counter()
    if sync is not None:
        sync()
    for r in results:
        if r is not None:
            r.detach().cpu()
    return time.perf_counter() - start, traced - start


def _contenders(
    row: Row, device: torch.device, sync: Callable[[], None] | None
) -> dict[str, Callable[[], Taken]]:
    """A timed call for each, compiled beforehand."""
    inputs = [torch.rand(t.shape, device=device, requires_grad=t.requires_grad) for t in row.inputs]
    if sync is not None:
        sync()

    def in_context(context: Callable[..., contextlib.AbstractContextManager[None]]) -> Taken:
        with context(device.type):
            return _time(row.step, inputs, sync)

    calls = {
        "stock": partial(in_context, torch_convfix.disabled),
        "ours": partial(in_context, torch_convfix.enabled),
    }
    if row.in_jax is not None:
        import jax

        arrays = [t.detach().cpu().numpy() for t in inputs]
        compiled = jax.jit(row.in_jax)

        def in_jax() -> Taken:
            start = time.perf_counter()
            results = compiled(*arrays)
            traced = time.perf_counter()
            jax.block_until_ready(results)
            return time.perf_counter() - start, traced - start

        calls["jax"] = in_jax
    for call in calls.values():
        call()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--device", choices=("cpu", "xla"), default="xla")
    add(parser, "--rounds", " at least", default=5)
    parser.add_argument(
        "--seconds", type=AMOUNT, default=3.0, help="how long each is timed at least"
    )
    add(parser, "--stop-after", ", in a row", default=60.0)
    add(parser, "--only", "rows, as 'W grouped*'")
    add(parser, "--json")
    args = parser.parse_args()

    torch.manual_seed(0)
    device, sync = torch.device("cpu"), None
    if args.device == "xla":
        import torch_xla

        device, sync = torch_xla.device(), torch_xla.sync
    found = []
    wanted = {name: row for name, row in _rows().items() if fnmatchcase(name, args.only)}
    for name, row in track(wanted.items(), description="timing"):
        calls = _contenders(row, device, sync)
        times: dict[str, list[Taken]] = {mode: [] for mode in calls}
        order = list(calls)
        start, passed = time.perf_counter(), 0.0
        while passed < args.seconds or (
            len(times["ours"]) < args.rounds and passed < args.stop_after
        ):
            for mode in order:
                times[mode].append(calls[mode]())
            order.reverse()  # neither always follows the other
            passed = time.perf_counter() - start
        figures: dict[str, Any] = {"row": name, "rounds": len(times["ours"])}
        for mode, taken in times.items():
            figures[f"{mode}_ms"] = 1e3 * statistics.median(t for t, _ in taken)
            figures[f"{mode}_trace_ms"] = 1e3 * statistics.median(t for _, t in taken)
        figures["ratio"] = figures["stock_ms"] / figures["ours_ms"]
        found.append(figures)

    table = Table(title=f"{args.device}, medians, float32")
    table.add_column("row")
    columns = (
        "rounds",
        "stock_ms",
        "ours_ms",
        "jax_ms",
        "ratio",
        "stock_trace_ms",
        "ours_trace_ms",
    )
    for column in columns:
        heading = "stock / ours" if column == "ratio" else column.replace("_", " ")
        table.add_column(heading, justify="right")
    for figures in found:
        cells = (f"{figures[c]:.5g}" if c in figures else "" for c in columns)
        table.add_row(figures["row"], *cells)
    Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
