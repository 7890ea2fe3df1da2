"""What ours adds where it changes nothing: tracing on XLA, first-order steps on the CPU, the import.

    python bench/overhead.py

Tracing: a call or a first-order step on XLA, without and with in turn; nothing is executed inside the
timed part. `merge` is what it costs to predict that merging groups is not worth it. CPU: a first-order
step in eager mode, without and with `enable("cpu")` in turn. Both in CPU time of one thread, since
a busy machine changes wall time; the ratio is the median of the rounds' ratios. Import: seconds beyond
torch and the installed stacks, in fresh processes.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F
import torch_xla
from nets import import_torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.func import functional_call

import torch_convfix

ROUNDS = 31
LAYER = ([1, 1], [1, 1], [1, 1], False, [0, 0])
Step = Callable[[], object]
Context = Callable[[str], AbstractContextManager[None]]


def forward(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.convolution(x, w, None, *LAYER, x.size(1) // w.size(1))


def backward(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten.convolution_backward(y, x, w, None, *LAYER, 1, [True, True, False])


def planned(grouped: str) -> Context:
    return partial(torch_convfix.enabled, hardware="tpu", grouped=grouped)


STOCK_AND_OURS = (torch_convfix.disabled, torch_convfix.enabled)
# The call, its groups, and the contexts without and with.
CONVOLUTIONS = {
    "convolution": (forward, 1, STOCK_AND_OURS),
    "convolution_backward": (backward, 1, STOCK_AND_OURS),
    "convolution of 4 groups, direct and merge": (
        forward,
        4,
        (planned("direct"), planned("merge")),
    ),
}


def convolution(call, groups: int, device: torch.device) -> Step:
    sizes = ([2, 8, 8, 8], [8, 8 // groups, 3, 3], [2, 8, 8, 8])
    inputs = [torch.rand(s, device=device) for s in sizes]
    return lambda: call(*inputs)


def resnet18(device: torch.device, *shape: int) -> Step:
    net = import_torchvision().models.resnet18().to(device)
    x, labels = torch.rand(shape, device=device), torch.arange(shape[0], device=device)
    parameters, buffers = list(net.parameters()), dict(net.named_buffers())

    def step() -> object:
        # On copies: running statistics that nobody executes keep every earlier step's graph alive.
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        loss = F.cross_entropy(functional_call(net, copies, (x,)), labels)
        return torch.autograd.grad(loss, parameters)

    return step


def first_order(function: Callable[..., Tensor], *inputs: Tensor) -> Step:
    """The value and its gradients with respect to `inputs`."""
    leaves = [t.requires_grad_() for t in inputs]
    return lambda: torch.autograd.grad(function(*leaves).sum(), leaves)


def operators() -> dict[str, Step]:
    """A first-order step of each operator whose second derivative PyTorch lacks, on the CPU."""
    queries = [torch.rand(4, 8, 128, 32) for _ in range(3)]
    labels = torch.randint(100, (256,))
    many = torch.stack([torch.randperm(100) for _ in range(256)])
    words, lengths = torch.randint(1000, (64, 20)), torch.full((64,), 16)
    grid2, grid3 = torch.rand(4, 32, 32, 2) * 2 - 1, torch.rand(2, 8, 16, 16, 3) * 2 - 1
    sample = partial(F.grid_sample, align_corners=False)
    return {
        "hardsigmoid": first_order(F.hardsigmoid, torch.rand(64, 64, 28, 28)),
        "grid_sample, 2-d": first_order(sample, torch.rand(4, 16, 32, 32), grid2),
        "grid_sample, 3-d": first_order(sample, torch.rand(2, 8, 8, 16, 16), grid3),
        "grid_sample, bicubic": first_order(
            partial(sample, mode="bicubic"), torch.rand(4, 16, 32, 32), grid2.clone()
        ),
        "scaled_dot_product_attention": first_order(F.scaled_dot_product_attention, *queries),
        "cdist": first_order(torch.cdist, torch.rand(256, 64), torch.rand(256, 64)),
        "cdist, p = 1": first_order(
            partial(torch.cdist, p=1.0), torch.rand(256, 64), torch.rand(256, 64)
        ),
        "pdist": first_order(F.pdist, torch.rand(256, 64)),
        "multi_margin_loss": first_order(
            lambda x: F.multi_margin_loss(x, labels), torch.rand(256, 100)
        ),
        "multilabel_margin_loss": first_order(
            lambda x: F.multilabel_margin_loss(x, many), torch.rand(256, 100)
        ),
        "embedding_bag": first_order(
            lambda w: F.embedding_bag(words, w, mode="mean"), torch.rand(1000, 64)
        ),
        "segment_reduce": first_order(
            lambda x: torch.segment_reduce(x, "sum", lengths=lengths), torch.rand(1024, 64)
        ),
    }


def seconds(step: Step, calls: int) -> float:
    """CPU seconds a call; results are kept until the clock stops, so that none is executed."""
    start = time.process_time()
    results = [step() for _ in range(calls)]
    taken = time.process_time() - start
    del results
    return taken / calls


def compare(
    table: Table,
    name: str,
    step: Step,
    device: str,
    contexts: tuple[Context, Context] = STOCK_AND_OURS,
) -> None:
    """A row: a call without and with, microseconds, and the ratio."""
    with contexts[1](device):
        calls = max(1, round(0.02 / seconds(step, 2)))
    rounds = []
    for i in range(ROUNDS):
        pair = {}
        for which in (0, 1) if i % 2 else (1, 0):
            with contexts[which](device):
                step()
                pair[which] = seconds(step, calls)
        rounds.append((pair[0], pair[1]))
    without, own = (1e6 * statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    table.add_row(name, f"{without:.1f}", f"{own:.1f}", f"{ratio:.3f}")


def import_seconds() -> float:
    code = (
        "import importlib.util as u, time, torch\n"
        "for m in ('torch_xla', 'torch_xla.runtime', 'torch_tpu'):\n"
        "    u.find_spec(m.split('.')[0]) and __import__(m)\n"
        "s = time.perf_counter(); import torch_convfix; print(time.perf_counter() - s)"
    )
    run = [sys.executable, "-c", code]
    return float(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


def empty(title: str) -> Table:
    return Table("step", "without", "with", "ratio", title=title)


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    device = torch_xla.device()
    table = empty("tracing on XLA, microseconds a call")
    for name, (call, groups, contexts) in CONVOLUTIONS.items():
        step = convolution(call, groups, device)
        torch_xla.sync()
        compare(table, name, step, "xla", contexts)
    step = resnet18(device, 2, 3, 64, 64)
    torch_xla.sync()
    compare(table, "ResNet-18, first order", step, "xla")
    console.print(table)

    table = empty("first-order steps on the CPU, microseconds")
    compare(table, "ResNet-18", resnet18(torch.device("cpu"), 2, 3, 64, 64), "cpu")
    for name, step in operators().items():
        compare(table, name, step, "cpu")
    console.print(table)
    imports = [import_seconds() for _ in range(5)]
    console.print(f"import torch_convfix: {statistics.median(imports):.3f} s, median of 5")


if __name__ == "__main__":
    main()
