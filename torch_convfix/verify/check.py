"""Compare one call: what a line of a report does when it is pasted."""

import warnings
from collections.abc import Callable
from typing import Any

from torch_convfix.verify.compare import Outcome, compare
from torch_convfix.verify.conv_cases import references
from torch_convfix.verify.derivatives import Call, Program, all_stages
from torch_convfix.verify.devices import get_device, kernels
from torch_convfix.verify.op_cases import function
from torch_convfix.verify.report import error_text


def check(
    op: str | Callable[..., Any],
    *args: Any,
    device: str = "xla",
    orders: int = 2,
    stock: bool = False,
    **kwargs: Any,
) -> Outcome:
    """Compare a call on a device with float64 on the CPU, print what differs, and return it.

    Args:
        op: a function, or its name in torch (``"nn.functional.elu"``).
        args: its arguments, tensors on the CPU; those that require a gradient are differentiated.
        device: as in `run`.
        orders: the highest order of derivatives; convolutions, by name, go one further.
        stock: run with the device's own kernels in place of ours.
        kwargs: its keyword arguments.
    """
    reference = references.get(op) if isinstance(op, str) else None
    call = Call(function(op) if isinstance(op, str) else op, args, kwargs, reference)
    try:
        program = Program(call.fn, args, kwargs)
        program(program.tensors)
    except Exception:
        call.must_raise = True
    where = get_device(device)
    with kernels(device, stock=stock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = compare(
            call, where, all_stages(orders + (reference is not None)), where.default_dtype()
        )
    _print(outcome)
    return outcome


def _print(outcome: Outcome) -> None:
    for stage, error in outcome.errors.items():
        wrong = outcome.wrong.get(stage)
        print(f"{stage}: {f'WRONG by {error_text(error)} in {wrong}' if wrong else 'right'}")
    for stage, line in outcome.raised.items():
        print(f"{stage}: raises {line}")
    if outcome.accepted:
        print(f"WRONG: {outcome.fault()}")
    for stage, line in outcome.refused.items():
        print(f"{stage}: refused, as on the CPU: {line}")
    if outcome.skipped:
        print(f"skipped: {outcome.skipped}")
