"""Compare your own model or loss on a device with float64 on the CPU, and name the call to blame.

Exit code 1 if any number is wrong, or was not compared.
"""

import argparse
import sys

import torch

from torch_convfix import _target
from torch_convfix._devices import default_device
from torch_convfix.commands._options import DEVICES, add


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The target, and the options of `torch_convfix.audit`."""
    parser.add_argument("target", help=_target.HELP)
    for name in ("--input", "--dtype", "--order", "--tolerance", "--stock"):
        add(parser, name)
    add(parser, "--device", DEVICES)


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
