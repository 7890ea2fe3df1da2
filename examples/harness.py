"""What the examples share: options, the device with stock's kernels or ours, the check, the verdict."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from rich.console import Console
from torch import Tensor

import torch_convfix
from torch_convfix.commands._options import Formatter, add

console = Console()


def options(description: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=Formatter)
    add(parser, "--device", choices=("cpu", "xla"), default="xla")
    add(parser, "--stock")
    add(parser, "--quick", ", checked less strictly")
    add(parser, "--out", "plots", metavar="FOLDER", default=Path("out") / name)
    return parser


def start(args: argparse.Namespace) -> torch.device:
    """The device, with the derivatives that ``args`` ask for; the seeds are set."""
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    if args.device == "xla":
        import torch_xla

        device = torch_xla.device()
    # Nodes are numbered by thread: in the device's own, gradients would be added in another order in
    # the first steps, which are then graphs of their own.
    torch.autograd.set_multithreading_enabled(False)
    (torch_convfix.disable if args.stock else torch_convfix.enable)(args.device)
    return device


def sync(device: torch.device) -> None:
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def gradient_error(
    step: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    device: torch.device,
    reference: Callable[..., Sequence[Tensor]] | None = None,
) -> float:
    """Largest deviation of ``step(*inputs)`` on ``device`` from the CPU's own, both in float64.

    ``reference`` is what the CPU runs, ``step`` unless given. In units of the largest entry of the tensor that it is in. PyTorch's own derivatives are the
    reference, so a device that is the CPU is compared with itself unless it is enabled.
    """

    def run(step: Callable[..., Sequence[Tensor]], where: torch.device) -> list[Tensor]:
        own = [t.detach().double() if t.is_floating_point() else t.detach() for t in inputs]
        own = [t.to(where).requires_grad_(t.is_floating_point()) for t in own]
        results = step(*own)
        sync(where)  # once, with all results alive
        return [t.detach().cpu() for t in results]

    got = run(step, device)
    with torch_convfix.disabled("cpu"):
        want = run(reference or step, torch.device("cpu"))
    pairs = list(zip(got, want, strict=True))
    largest = max(w.abs().max().item() for _, w in pairs)
    # An entry of rounding size (a bias before a normalization) is measured against the largest.
    return max(
        ((g - w).abs().max() / max(w.abs().max().item(), 1e-9 * largest)).item() for g, w in pairs
    )


def right(error: float, tolerance: float = 1e-6) -> str:
    return f"right to {error:.0e}" if error < tolerance else f"{100 * error:.1f} % wrong"


def verdict(checks: Mapping[str, bool]) -> int:
    """Print each check; the exit code is 0 when all hold."""
    for claim, holds in checks.items():
        mark = "[green]holds[/]" if holds else "[red]fails[/]"
        console.print(f"{mark}  {claim}")
    return 0 if all(checks.values()) else 1
