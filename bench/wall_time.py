"""Wall time, stock and ours in turn in one run: medians and ratios.

    python bench/wall_time.py [--device xla|cpu] [--rounds 5] [--seconds 3] [--only SUBSTRING]
                              [--json FILE]

`xla` is torch_xla on XLA:CPU, `cpu` plain PyTorch.

Each figure is one traced and executed call, compiled beforehand; `trace` is the part until the
results are asked for. Shapes are those of the layers named; W, I and F are the weight gradient, the
input gradient and the forward of one layer alone; `_gp` is a gradient-penalty step, `_fb` a forward
and backward.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # TorchTPU would look for a TPU's host for minutes

import layers
import torch
import torch_steps
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import torch_convfix
from torch_convfix.functional import conv_forward, conv_input_grad, conv_weight_grad

Step = Callable[[Tensor, Tensor], Sequence[Tensor]]
Row = tuple[Step, Sequence[int], Sequence[int]]  # and the sizes of input and weight


def workload(name: str) -> Row:
    """One of those that bench/run compiles."""
    with torch.device("meta"):  # only the sizes are used
        step, (x, w) = getattr(torch_steps, name)()
    return lambda x, w: step(x.requires_grad_(), w.requires_grad_()), x.shape, w.shape


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
    table = {
        **{name: workload(name) for name in (*layers.PENALTIES, *layers.FORWARD_BACKWARDS)},
        "W grouped 128/32 28x28": (alone("W", **same, groups=32), [4, 128, 28, 28], [128, 4, 3, 3]),
        "W grouped 512/32 14x14": (
            alone("W", **same, groups=32),
            [4, 512, 14, 14],
            [512, 16, 3, 3],
        ),
        "W transposed 64/4 28x28": (
            alone("W", **tr, groups=4),
            [4, 64, 28, 28],
            [64, 16, 3, 3],
        ),
        "W depthwise x2 96 28x28": (
            alone("W", **same, groups=96),
            [4, 96, 28, 28],
            [192, 1, 3, 3],
        ),
        "W dense 128 28x28": (alone("W", **same), [4, 128, 28, 28], [128, 128, 3, 3]),
        "W dense 3-d 16 16^3": (alone("W", **same), [2, 16, 16, 16, 16], [16, 16, 3, 3, 3]),
        "I grouped 3-d 16/4 16^3": (
            alone("I", **same, groups=4),
            [2, 16, 16, 16, 16],
            [16, 4, 3, 3, 3],
        ),
    }
    for k in (3, 5, 7):
        for which in "FIW":
            layer = {"stride": 1, "padding": k // 2, "groups": 64}
            table[f"{which} depthwise 64 {k}x{k} 32x32"] = (
                alone(which, **layer),
                [8, 64, 32, 32],
                [64, 1, k, k],
            )
    for which in "FIW":
        table[f"{which} depthwise 96 s2 56x56"] = (
            alone(which, **half, groups=96),
            [8, 96, 56, 56],
            [96, 1, 3, 3],
        )
        table[f"{which} depthwise small 8 8x8"] = (
            alone(which, **same, groups=8),
            [1, 8, 8, 8],
            [8, 1, 3, 3],
        )
        table[f"{which} depthwise 1024 7x7"] = (
            alone(which, **same, groups=1024),
            [4, 1024, 7, 7],
            [1024, 1, 3, 3],
        )
    return table


def _time(
    step: Step, inputs: Sequence[Tensor], sync: Callable[[], None] | None
) -> tuple[float, float]:
    inputs = [t.detach() for t in inputs]
    start = time.perf_counter()
    results = step(*inputs)
    traced = time.perf_counter()
    if sync is not None:
        sync()
    for r in results:
        r.detach().cpu()
    return time.perf_counter() - start, traced - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["xla", "cpu"], default="xla")
    parser.add_argument("--rounds", type=int, default=5, help="least rounds a row (default 5)")
    parser.add_argument("--seconds", type=float, default=3, help="least time a row (default 3)")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    device, sync = torch.device("cpu"), None
    if args.device == "xla":
        import torch_xla

        device, sync = torch_xla.device(), torch_xla.sync
    rows = []
    wanted = {name: row for name, row in _rows().items() if args.only in name}
    for name, (step, x, w) in track(wanted.items(), description="timing"):
        inputs = [torch.rand(x, device=device), torch.rand(w, device=device)]
        if sync is not None:
            sync()
        times: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
        contexts = [("stock", torch_convfix.disabled), ("ours", torch_convfix.enabled)]
        for _, context in contexts:  # compiles
            with context(args.device):
                _time(step, inputs, sync)
        start = time.perf_counter()
        while len(times["ours"]) < args.rounds or time.perf_counter() - start < args.seconds:
            for mode, context in contexts:
                with context(args.device):
                    times[mode].append(_time(step, inputs, sync))
            contexts.reverse()  # neither always follows the other
        row: dict = {"row": name, "rounds": len(times["ours"])}
        for mode, taken in times.items():
            row[f"{mode}_ms"] = 1e3 * statistics.median(t for t, _ in taken)
            row[f"{mode}_trace_ms"] = 1e3 * statistics.median(t for _, t in taken)
        row["ratio"] = row["stock_ms"] / row["ours_ms"]
        rows.append(row)

    table = Table(title=f"{args.device}, medians of {args.rounds} or more, float32")
    table.add_column("row")
    for column in ("stock ms", "ours ms", "stock / ours", "stock trace ms", "ours trace ms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["row"],
            f"{row['stock_ms']:.2f}",
            f"{row['ours_ms']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['stock_trace_ms']:.2f}",
            f"{row['ours_trace_ms']:.2f}",
        )
    Console(width=110).print(table)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
