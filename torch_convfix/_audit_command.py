"""Compare your own model or loss on a device with float64 on the CPU, and name the call to blame.

TARGET is module:function. With --shape, it is called with random tensors of those shapes; without,
it takes no arguments and returns (fn, *inputs), as `torch_convfix.audit` takes them.
"""

import argparse
import importlib
import os
import sys

import torch

from torch_convfix.verify.audit import audit


def _shape(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target, and the options of `torch_convfix.audit`."""
    add = parser.add_argument
    add("target", metavar="module:function")
    add("--shape", action="append", type=_shape, metavar="N,N,...", help="of a random input; may be repeated")  # fmt: skip
    add("--device", default="xla", help="as for verify")
    add("--order", type=int, default=2, help="highest order")
    add("--stock", action="store_true", help="with the device's own kernels")
    add("--dtype", help="on the device, as float32")
    add("--tolerance", type=float, help="relative error from which a result is wrong")


def main(args: argparse.Namespace) -> int:
    """Audit and print."""
    module, _, name = args.target.partition(":")
    if not name:
        raise SystemExit(f"TARGET must be module:function, got {args.target!r}")
    sys.path.insert(0, os.getcwd())
    target = getattr(importlib.import_module(module), name)
    if args.shape:
        fn, inputs = target, [torch.randn(s, requires_grad=True) for s in args.shape]
    else:
        fn, *inputs = target()
    dtype = getattr(torch, args.dtype) if args.dtype else None
    report = audit(
        fn, *inputs, device=args.device, order=args.order, stock=args.stock, dtype=dtype,
        tolerance=args.tolerance,
    )  # fmt: skip
    print(report)
    return 0 if report.ok else 1
