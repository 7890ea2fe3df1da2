"""What ours adds where it changes nothing: tracing one direct convolution, and the import.

    python bench/overhead.py

Tracing: microseconds a call on XLA, stock and ours in turn, median of rounds; nothing is executed
inside the timed part. Import: seconds beyond torch and the installed stacks, in fresh processes.
"""

import statistics
import subprocess
import sys
import time

import torch
import torch_xla
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_convfix

CALLS, ROUNDS = 300, 15
LAYER = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def forward(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.convolution(x, w, None, *LAYER)


def backward(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(y, x, w, None, *LAYER, [True, True, False])


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
    sizes = ([2, 8, 8, 8], [8, 8, 3, 3], [2, 8, 8, 8])
    inputs = [torch.rand(s, device=device) for s in sizes]
    torch_xla.sync()
    table = Table(title="tracing a direct convolution on XLA, microseconds a call")
    for column in ("call", "stock", "ours", "ours - stock"):
        table.add_column(column)
    for call in (forward, backward):
        taken = {"stock": [], "ours": []}
        for i in range(ROUNDS + 1):
            for name, context in (
                ("stock", torch_convfix.disabled),
                ("ours", torch_convfix.enabled),
            ):
                with context("xla"):
                    microseconds = trace_microseconds(call, inputs)
                if i:
                    taken[name].append(microseconds)
        stock, ours = (statistics.median(t) for t in taken.values())
        table.add_row(call.__name__, f"{stock:.1f}", f"{ours:.1f}", f"{ours - stock:.1f}")
    console = Console()
    console.print(table)
    imports = [import_seconds() for _ in range(5)]
    console.print(f"import torch_convfix: {statistics.median(imports):.3f} s, median of 5")


if __name__ == "__main__":
    main()
