"""Compare your own model or loss on a device with float64 on the CPU, and name the call to blame.

Exit code 1 if any number is wrong, or was not compared.
"""

import argparse
import sys

import torch

from torch_convfix import _target
from torch_convfix._devices import default_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target, and the options of `torch_convfix.audit`."""
    add = parser.add_argument
    add("target", help=_target.HELP)
    add("--input", action="append", default=[], metavar="SHAPE[:DTYPE]", help=_target.INPUT_HELP)
    add("--device", help="as for verify; by default that of the stack that is installed")
    add("--order", type=int, choices=range(6), default=2, help="highest order")
    add("--stock", action="store_true", help="with the device's own kernels")
    add("--dtype", choices=("float64", "float32", "float16", "bfloat16"), help="on the device")
    add("--tolerance", type=float, help="relative error from which a result is wrong")


def main(args: argparse.Namespace) -> int:
    """Audit and print; 2 where there is nothing to audit."""
    try:
        device = args.device or default_device()
        from torch_convfix.verify.audit import NothingToAuditError, audit
        from torch_convfix.verify.devices import get_device, kernels

        get_device(device)
        with kernels(device, stock=args.stock):
            pass
        fn, inputs = _target.resolve(args.target, args.input)
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        report = audit(
            fn,
            *inputs,
            device=device,
            order=args.order,
            stock=args.stock,
            dtype=getattr(torch, args.dtype) if args.dtype else None,
            tolerance=args.tolerance,
        )
    except NothingToAuditError as error:
        print(error, file=sys.stderr)
        return 2
    print(report)
    return 0 if report.ok else 1
