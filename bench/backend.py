"""Composed convolutions on the CPU beside PyTorch's own kernels, with oneDNN and without.

    python bench/backend.py [--only PATTERN] [--json FILE]

F, I and W of layers of ResNet-50, MobileNetV2 and StyleGAN, float32, in one run and in turn; medians,
milliseconds. `kept` is what a call needs beside its operands and its result at the most, MB.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torch_convfix
from torch_convfix.commands._options import Formatter, add

REPEATS = 9


@dataclass(frozen=True)
class Layer:
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    groups: int = 1
    transposed: bool = False

    @property
    def arguments(self):
        padding, output_padding = self.w[2] // 2, int(self.transposed and self.stride > 1)
        return (
            [self.stride] * 2,
            [padding] * 2,
            [1] * 2,
            self.transposed,
            [output_padding] * 2,
            self.groups,
        )


LAYERS = {
    "ResNet-50, stem": Layer((4, 3, 224, 224), (64, 3, 7, 7), 2),
    "ResNet-50, 56, 1 x 1": Layer((4, 64, 56, 56), (256, 64, 1, 1)),
    "ResNet-50, 56, 3 x 3": Layer((4, 64, 56, 56), (64, 64, 3, 3)),
    "ResNet-50, 28, 3 x 3, stride 2": Layer((4, 128, 56, 56), (128, 128, 3, 3), 2),
    "ResNet-50, 14, 3 x 3": Layer((4, 256, 14, 14), (256, 256, 3, 3)),
    "ResNet-50, 7, 3 x 3": Layer((4, 512, 7, 7), (512, 512, 3, 3)),
    "MobileNetV2, 112, 1 x 1": Layer((4, 16, 112, 112), (96, 16, 1, 1)),
    "MobileNetV2, 56, depthwise": Layer((4, 144, 56, 56), (144, 1, 3, 3), 1, 144),
    "MobileNetV2, 14, depthwise, stride 2": Layer((4, 576, 14, 14), (576, 1, 3, 3), 2, 576),
    "StyleGAN, 32": Layer((4, 512, 32, 32), (512, 512, 3, 3)),
    "StyleGAN, 64, transposed": Layer((4, 256, 32, 32), (256, 128, 3, 3), 2, 1, True),
    "StyleGAN, 128": Layer((4, 64, 128, 128), (64, 64, 3, 3)),
}
CONTENDERS: dict[str, Callable[[], AbstractContextManager]] = {
    "oneDNN": nullcontext,
    "native": lambda: torch.backends.mkldnn.flags(enabled=False),
    "composed": lambda: torch_convfix.enabled("cpu", convolution="composed"),
}


def calls(layer: Layer) -> dict[str, Callable[[], object]]:
    x, w = torch.rand(layer.x), torch.rand(layer.w)
    y = torch.ops.aten.convolution(x, w, None, *layer.arguments)
    g = torch.rand(y.shape)

    def backward(mask: list[bool]) -> tuple[Tensor, ...]:
        return torch.ops.aten.convolution_backward(g, x, w, None, *layer.arguments, mask)

    return {
        "F": lambda: torch.ops.aten.convolution(x, w, None, *layer.arguments),
        "I": lambda: backward([True, False, False]),
        "W": lambda: backward([False, True, False]),
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def most_bytes(call: Callable[[], object]) -> int:
    """Allocated at the most within the call, by the profiler's record of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = call()
    now = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del result
    return most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--only", "layers, as 'StyleGAN*'")
    add(parser, "--json")
    args = parser.parse_args()
    chosen = {name: layer for name, layer in LAYERS.items() if fnmatchcase(name, args.only)}
    if not chosen:
        print(f"--only must match a layer, as 'StyleGAN*' does, got {args.only!r}", file=sys.stderr)
        return 2
    rows = []
    for name, layer in track(chosen.items(), console=Console(stderr=True)):
        for which, call in calls(layer).items():
            taken: dict[str, list[float]] = {c: [] for c in CONTENDERS}
            for repeat in range(REPEATS + 1):
                for contender, context in CONTENDERS.items():
                    with context():
                        passed = seconds(call)
                    if repeat:
                        taken[contender].append(passed)
            medians = {c: statistics.median(t) for c, t in taken.items()}
            with CONTENDERS["composed"]():
                most = most_bytes(call)
            rows.append({"layer": name, "of": which, **medians, "bytes": most})
    table = Table(box=None)
    for column in ("layer", "", *CONTENDERS, "of native", "of oneDNN", "allocated, MB"):
        table.add_column(column, justify="left" if column in ("layer", "") else "right")
    ratios = []
    for row in rows:
        ratios.append((row["composed"] / row["native"], row["composed"] / row["oneDNN"]))
        times = (f"{1e3 * row[c]:.2f}" for c in CONTENDERS)
        of = (f"{ratio:.2f}" for ratio in ratios[-1])
        table.add_row(row["layer"], row["of"], *times, *of, f"{row['bytes'] / 1e6:.1f}")
    medians = [f"{statistics.median(r):.2f}" for r in zip(*ratios, strict=True)]
    table.add_row("median", "", *[""] * len(CONTENDERS), *medians, "")
    Console(width=130).print(table)
    if args.json:
        Path(args.json).write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
