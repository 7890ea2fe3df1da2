"""What checkpointing saves of a step's memory and costs in cycles, by the TPU compiler.

    python bench/checkpoint.py [--batch 32] [--size 224] [--topology v5e] [--stack torch_xla]

Every block of MobileNetV2 is checkpointed, in a first-order and in an R1 step: not at all, by
torch.utils.checkpoint (non-reentrant) and by torch_convfix.checkpoint.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import nets
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import torch_convfix
from torch_convfix import tpu
from torch_convfix.commands._options import Formatter, add

Apply = Callable[..., Any]
APPLY: dict[str, Apply] = {
    "none": lambda block, x: block(x),
    "torch.utils.checkpoint": partial(checkpoint, use_reentrant=False),
    "torch_convfix.checkpoint": torch_convfix.checkpoint,
}


def logits(apply: Apply, model: nn.Module, x: Tensor) -> Tensor:
    """As torchvision's MobileNetV2 has it."""
    for block in model.features:
        x = apply(block, x)
    return model.classifier(x.mean((2, 3)))


def first_order(apply: Apply, model: nn.Module, x: Tensor) -> Sequence[Tensor]:
    return grad(logits(apply, model, x).logsumexp(1).sum(), list(model.parameters()))


def r1(apply: Apply, model: nn.Module, x: Tensor) -> Sequence[Tensor]:
    (g,) = grad(logits(apply, model, x).sum(), x, create_graph=True)
    return grad(g.square().sum(), list(model.parameters()), allow_unused=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--topology")
    add(parser, "--stack", default="torch_xla")
    parser.add_argument("--batch", type=int, default=32, help="images")
    parser.add_argument("--size", type=int, default=224, help="of an image, pixels")
    args = parser.parse_args()
    model = nets.classifier("mobilenet_v2")
    x = torch.rand(args.batch, 3, args.size, args.size, requires_grad=True)
    table = Table(box=None)
    for column in ("step", "checkpoint", "cycles", "temporaries, MB", "peak, MB"):
        table.add_column(column, justify="right")
    todo = [(step, name) for step in (first_order, r1) for name in APPLY]
    for step, name in track(todo, console=Console(stderr=True)):
        made = partial(step, APPLY[name])
        report = tpu.compile(made, model, x, topology=args.topology, stack=args.stack, name=name)
        mb = (f"{b / 1e6:,.0f}" for b in (report.temporary_bytes, report.peak_bytes))
        table.add_row(step.__name__, name, f"{report.cycles:,}", *mb)
        print(step.__name__, name, report.cycles, report.temporary_bytes, file=sys.stderr)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
