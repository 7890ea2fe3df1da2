"""What ours adds where it changes nothing: tracing one convolution, and the import.

    python bench/overhead.py

Tracing: microseconds a call on XLA, without and with in turn, median of rounds; nothing is executed
inside the timed part. `merge` is what it costs to predict that merging groups is not worth it.
Import: seconds beyond torch and the installed stacks, in fresh processes.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch_xla
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_convfix

CALLS, ROUNDS = 300, 15
LAYER = ([1, 1], [1, 1], [1, 1], False, [0, 0])


def forward(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.convolution(x, w, None, *LAYER, x.size(1) // w.size(1))


def backward(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(y, x, w, None, *LAYER, 1, [True, True, False])


def planned(grouped: str) -> Callable[[str], AbstractContextManager[None]]:
    return partial(torch_convfix.enabled, hardware="tpu", grouped=grouped)


# The call, its groups, and the contexts without and with.
ROWS = {
    "stock, ours: forward": (forward, 1, torch_convfix.disabled, torch_convfix.enabled),
    "stock, ours: backward": (backward, 1, torch_convfix.disabled, torch_convfix.enabled),
    "direct, merge: forward of 4 groups": (forward, 4, planned("direct"), planned("merge")),
}


def trace_microseconds(call, inputs: list[Tensor]) -> float:
    results = []
    start = time.perf_counter()
    for _ in range(CALLS):
        results.append(call(*inputs))
    taken = time.perf_counter() - start
    del results  # never executed
    return 1e6 * taken / CALLS


def import_seconds() -> float:
    code = (
        "import importlib.util as u, time, torch\n"
        "for m in ('torch_xla', 'torch_xla.runtime', 'torch_tpu'):\n"
        "    u.find_spec(m.split('.')[0]) and __import__(m)\n"
        "s = time.perf_counter(); import torch_convfix; print(time.perf_counter() - s)"
    )
    run = [sys.executable, "-c", code]
    return float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    device = torch_xla.device()
    table = Table(title="tracing a convolution on XLA, microseconds a call")
    for column in ("call", "without", "with", "difference"):
        table.add_column(column)
    for name, (call, groups, *contexts) in ROWS.items():
        sizes = ([2, 8, 8, 8], [8, 8 // groups, 3, 3], [2, 8, 8, 8])
        inputs = [torch.rand(s, device=device) for s in sizes]
        torch_xla.sync()
        taken: list[list[float]] = [[], []]
        for i in range(ROUNDS + 1):
            for of, context in zip(taken, contexts, strict=True):
                with context("xla"):
                    microseconds = trace_microseconds(call, inputs)
                if i:
                    of.append(microseconds)
        without, own = map(statistics.median, taken)
        table.add_row(name, f"{without:.1f}", f"{own:.1f}", f"{own - without:.1f}")
    console = Console()
    console.print(table)
    imports = [import_seconds() for _ in range(5)]
    console.print(f"import torch_convfix: {statistics.median(imports):.3f} s, median of 5")


if __name__ == "__main__":
    main()
