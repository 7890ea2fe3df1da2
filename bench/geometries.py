"""Do second-order steps of many convolutions compile for every TPU? By the TPU's own compiler.

    python bench/geometries.py [--cases 40] [--seed 0] [--topology v2,v4,v5e,v6e]

One gradient-penalty step a geometry: those of the first report (32x3x32x32, 3 and 4 x 3 and 4 kernels
of stride 2, and the transposed convolution of its double backward at every output padding), then
random ones. Exit code 1 if one does not compile.
"""

import argparse
import os
import sys
from random import Random

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch_xla
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from torch_convfix.commands._options import Formatter, add
from torch_convfix.tpu import CompileError, _compiler, _step
from torch_convfix.verify import conv_cases
from torch_convfix.verify.conv_cases import ConvCase

torch_xla.device()  # before any backward on the CPU


def seed_cases() -> list[ConvCase]:
    plain = [
        ConvCase(
            (32, 32),
            (k, k),
            (2, 2),
            (1, 1),
            (1, 1),
            (0, 0),
            in_per_group=3,
            out_per_group=20,
            batch=32,
        )
        for k in (3, 4)
    ]
    transposed = [
        ConvCase(
            (3, 3),
            (16, 16),
            (s, s),
            (1, 1),
            (d, d),
            (op, op),
            transposed=True,
            in_per_group=20,
            out_per_group=32,
            batch=3,
        )
        for s, d in ((1, 2), (2, 1), (3, 1), (1, 3))
        for op in range(max(s, d))
    ]
    return plain + transposed


def random_cases(count: int, seed: int) -> list[ConvCase]:
    random, cases = Random(seed), []
    while len(cases) < count:
        case = conv_cases.draw(random)
        if not case.must_raise and case.batch:
            cases.append(case)
    return cases


def penalty(case: ConvCase, x: Tensor, w: Tensor) -> list[Tensor]:
    _, _, *rest = case.arguments()
    bias = torch.ones_like(rest[0], dtype=x.dtype, device=x.device) if case.bias else None
    y = getattr(torch.nn.functional, case.op.rsplit(".", 1)[1])(x, w, bias, *rest[1:])
    gradients = torch.autograd.grad(torch.tanh(y).sum(), [x, w], create_graph=True)
    return list(torch.autograd.grad(sum((g * g).sum() for g in gradients), [x, w]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--cases", default=40)
    add(parser, "--seed")
    add(parser, "--topology", "; several with commas between", default="v2,v4,v5e,v6e")
    args = parser.parse_args()

    topologies = args.topology.split(",")
    for topology in topologies:
        _compiler.check(topology)
    cases = seed_cases() + random_cases(args.cases, args.seed)
    compiled, failures = dict.fromkeys(topologies, 0), []
    for case in track(cases, console=Console(stderr=True), description="compiling"):
        inputs = [t.detach().float().requires_grad_() for t in case.arguments()[:2]]
        stablehlo, _ = _step.trace(
            lambda x, w, case=case: penalty(case, x, w), inputs, "torch_xla", "ours"
        )
        for topology in topologies:
            try:
                _compiler.compile_stablehlo(stablehlo, topology)
                compiled[topology] += 1
            except CompileError as error:
                failures.append(f"{topology}: {case.spell()}: {str(error).splitlines()[0]}")
    table = Table(title=f"gradient-penalty steps of {len(cases)} convolutions")
    for column in ("topology", "compiled"):
        table.add_column(column)
    for topology, count in compiled.items():
        table.add_row(topology, f"{count} of {len(cases)}")
    console = Console()
    console.print(table)
    for failure in failures:
        console.print(failure)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
