"""Export convolutions with unbounded-dynamic sizes to StableHLO: run in a process of its own.

    EXPERIMENTAL_XLA_UNBOUNDED_DYNAMISM=1 python stablehlo_exports.py RESULTS

Writes, by name, the shape of the result and the number of convolutions, or the error's first line.
"""

import json
import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, export
from torch_xla.stablehlo import exported_program_to_stablehlo

import torch_convfix  # noqa: F401

BATCH, HEIGHT, WIDTH = Dim("batch", min=2, max=99), Dim("h", min=8, max=99), Dim("w", min=8, max=99)
IMAGES = (2, 3, 9, 11)
ALL = {0: BATCH, 2: HEIGHT, 3: WIDTH}

EXPORTS: dict[str, tuple[nn.Module, tuple[int, ...], dict]] = {
    "conv2d, batch": (nn.Conv2d(3, 4, 3, stride=2, padding=1), IMAGES, {0: BATCH}),
    "conv2d, all": (nn.Conv2d(3, 4, 3, stride=2, padding=1), IMAGES, ALL),
    "grouped, all": (nn.Conv2d(3, 6, 3, groups=3), IMAGES, ALL),
    "conv_transpose2d, batch": (
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        IMAGES,
        {0: BATCH},
    ),
    "conv_transpose2d, all": (
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        IMAGES,
        ALL,
    ),
    "net, batch": (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
        IMAGES,
        {0: BATCH},
    ),
    "conv1d, batch": (nn.Conv1d(3, 4, 3), (2, 3, 9), {0: BATCH}),
    "conv1d, width": (nn.Conv1d(3, 4, 3), (2, 3, 9), {2: WIDTH}),
    "conv3d, batch": (nn.Conv3d(3, 4, 3), (2, 3, 4, 5, 6), {0: BATCH}),
}


def main(path: str) -> None:
    results: dict[str, list | str] = {}
    for name, (model, size, dynamic) in EXPORTS.items():
        program = export(model.eval(), (torch.randn(size),), dynamic_shapes=[dynamic])
        try:
            text = exported_program_to_stablehlo(program).get_stablehlo_text()
        except RuntimeError as error:
            results[name] = str(error).splitlines()[0]
        else:
            (shape,) = re.findall(r"func.func @main.*-> tensor<(.*)xf32>", text)
            results[name] = [shape, text.count("stablehlo.convolution")]
    Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
