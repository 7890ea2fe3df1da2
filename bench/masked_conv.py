"""Masked convolutions against the multiplied mask: flops and time.

    python bench/masked_conv.py [--device cpu|xla] [--rounds 15] [--only PATTERN] [--algorithm A]
                                [--topology NAME]

Times are the least of `--rounds` calls, both ways in turn in one run; a ratio below 1 means that
the cut kernel is faster. `step` is a forward and backward. `flops` is XLA's cost analysis of the
forward, cut over dense, beside kept taps over all taps (needs torch_xla and jax). `--topology v5e:2x2`
adds the ratio of the TPU compiler's estimated cycles for the step (needs libtpu, no TPU).
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import torch_convfix
from torch_convfix.commands._options import Formatter, add
from torch_convfix.nn import MaskedConv2d, causal_mask

LAYERS = {  # channels in, out, image, batch
    "first, 1 channel": (1, 64, 28, 32),
    "first, colour": (3, 64, 32, 16),
    "narrow": (16, 32, 28, 16),
    "PixelCNN": (64, 64, 28, 16),
    "wide": (128, 128, 16, 8),
}
KERNELS = [(size, kind) for size in (3, 5, 7) for kind in "AB"]


class Multiplied(nn.Conv2d):
    def __init__(self, *args, mask: Tensor, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", mask.float())

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


def forward(layer: nn.Module, x: Tensor) -> Sequence[Tensor]:
    with torch.no_grad():
        return [layer(x)]


def step(layer: nn.Module, x: Tensor) -> Sequence[Tensor]:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x).square().mean(), [x, *layer.parameters()])


def times(calls: Sequence[Callable[[], Sequence[Tensor]]], rounds: int, xla: bool) -> list[float]:
    """The least seconds of each call; the first two of each are left out."""
    least = [float("inf")] * len(calls)
    for i in range(rounds + 2):
        for k, call in enumerate(calls):
            start = time.perf_counter()
            results = call()
            if xla:
                import torch_xla

                torch_xla.sync()
                [r.cpu() for r in results]
            if i >= 2:
                least[k] = min(least[k], time.perf_counter() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--device", choices=("cpu", "xla"), default="cpu")
    add(parser, "--rounds", default=15)
    add(parser, "--only", "layers, as 'first*'")
    parser.add_argument(
        "--algorithm",
        choices=("auto", "direct", "im2col"),
        default="auto",
        help="of the cut kernel",
    )
    add(parser, "--topology", "; by default no estimate", default=None)
    parser.add_argument("--no-time", action="store_true", help="flops and estimates only")
    args = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    try:
        import torch_xla

        device, counted = torch_xla.device(), True
    except ImportError:
        device, counted = None, False
    device = device if args.device == "xla" else torch.device("cpu")

    table = Table(title=f"cut kernel / multiplied mask, {args.device}")
    for column in ("layer", "kernel", "kept", "flops", "forward", "step", "TPU cycles"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    console = Console(width=110)
    jobs = [(n, k) for n in LAYERS if fnmatchcase(n, args.only) for k in KERNELS]
    for name, (size, kind) in track(jobs, console=Console(stderr=True)):
        ins, outs, image, batch = LAYERS[name]
        mask = causal_mask(size, kind)
        x = torch.randn(batch, ins, image, image)
        common = (ins, outs, size, 1, size // 2)
        layers = [
            MaskedConv2d(*common, mask=mask, algorithm=args.algorithm),
            Multiplied(*common, mask=mask),
        ]
        row = [name, f"{size}x{size} {kind}", f"{mask.float().mean():.3f}", "", "", "", ""]
        on_device = [layer.to(device) for layer in layers]
        if not args.no_time:
            at, xla = x.to(device), args.device == "xla"
            for column, run in ((4, forward), (5, step)):
                calls = [lambda layer=layer: run(layer, at) for layer in on_device]  # noqa: B023
                ours, usual = times(calls, args.rounds, xla)
                row[column] = f"{ours / usual:.2f} ({usual * 1e3:.2f} ms)"
        if counted:
            from torch_convfix.tpu import _compiler, _jax
            from torch_convfix.tpu.torch_xla import stablehlo

            at = x.to(torch_xla.device())
            lazy = [layer.to(at.device) for layer in layers]
            ours, usual = (_jax.flops(stablehlo(list(forward(layer, at)))) for layer in lazy)
            row[3] = f"{ours / usual:.3f}"
            if args.topology:
                with torch_convfix.enabled("xla", hardware="tpu"):
                    texts = [stablehlo(list(step(layer, at))) for layer in lazy]
                ours, usual = (
                    _compiler.compile_stablehlo(t, args.topology)[0].cycles for t in texts
                )
                row[6] = f"{ours / usual:.2f} ({usual:,})"
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
