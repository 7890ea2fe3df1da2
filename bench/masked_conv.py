"""Masked convolutions against the multiplied mask: flops and time.

    python bench/masked_conv.py [--device cpu|xla] [--rounds 15] [--only SUBSTRING] [--algorithm A] [--tpu T]

Times are the least of `--rounds` calls, both ways in turn in one run; a ratio below 1 means that
the cut kernel is faster. `step` is a forward and backward. `flops` is XLA's cost analysis of the
forward, cut over dense, beside kept taps over all taps (needs torch_xla and jax). `--tpu v5e:2x2`
adds the ratio of the TPU compiler's estimated cycles for the step (needs libtpu, no TPU).
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import torch_convfix
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


def compiled(results: Sequence[Tensor], topology: str | None):
    """The executable of lazy ``results`` for XLA:CPU, or for a TPU that is not there."""
    from torch_convfix.tpu import _environment

    _environment.prepare()
    import jax
    import torch_xla
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from jax.experimental import topologies

    # Not the StableHLO text: torch_xla 2.9.0 packs boolean constants as jaxlib does not read them.
    hlo = torch_xla._XLAC._get_xla_tensors_hlo_proto(list(results))
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    with jax_mlir.make_ir_context():
        module, options = ir.Module.parse(text), xla_client.CompileOptions()
        if topology is None:
            device = jax.devices("cpu")[0]
            devices = xla_client.DeviceList((device,))
            return device.client.compile_and_load(module, devices, options)
        device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
        return device.client.compile(module, xla_client.DeviceList((device,)), options)


def flops(executable) -> float:
    analysis = executable.cost_analysis()
    return (analysis[0] if isinstance(analysis, list) else analysis)["flops"]


def cycles(executable) -> int:
    text = executable.hlo_modules()[0].to_string()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "xla"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="layers whose name has this in it")
    parser.add_argument("--algorithm", choices=("auto", "direct", "im2col"), default="auto")
    parser.add_argument("--tpu", metavar="TOPOLOGY")
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
    jobs = [(n, k) for n in LAYERS if args.only in n for k in KERNELS]
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
            import torch_xla

            at = x.to(torch_xla.device())
            lazy = [layer.to(at.device) for layer in layers]
            ours, usual = (flops(compiled(forward(layer, at), None)) for layer in lazy)
            row[3] = f"{ours / usual:.3f}"
            if args.tpu:
                with torch_convfix.enabled("xla", hardware="tpu"):
                    ours, usual = (cycles(compiled(step(layer, at), args.tpu)) for layer in lazy)
                row[6] = f"{ours / usual:.2f} ({usual:,})"
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
