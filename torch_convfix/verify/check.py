"""Compare one call: what a line of a report does when it is pasted."""

import warnings
from collections.abc import Callable
from typing import Any

from torch_convfix.verify.compare import Outcome, compare
from torch_convfix.verify.conv_cases import ConvCase, references
from torch_convfix.verify.derivatives import Call, Program, all_stages
from torch_convfix.verify.devices import get_device, kernels
from torch_convfix.verify.module_cases import ModuleCase
from torch_convfix.verify.op_cases import OpCase, function
from torch_convfix.verify.report import error_text
from torch_convfix.verify.results import Case


def check(
    op: str | Callable[..., Any] | Case,
    *args: Any,
    device: str = "xla",
    order: int = 2,
    stock: bool = False,
    **kwargs: Any,
) -> Outcome:
    """Compare a call on a device with float64 on the CPU, print what differs, and return it.

    Args:
        op: a function, its name in torch (``"nn.functional.elu"``), or a case of a sweep.
        args: its arguments, tensors on the CPU; those that require a gradient are differentiated.
        device: as in `run`.
        order: the highest order of derivatives; convolutions, by name, go one further.
        stock: run with the device's own kernels in place of ours.
        kwargs: its keyword arguments.
    """
    where = get_device(device)
    dtype = where.default_dtype()
    match op:
        case ConvCase():
            call = op.call()
        case OpCase() | ModuleCase():
            call = op.call(dtype)
        case str():
            call = Call(function(op), args, kwargs, references.get(op))
        case _:
            call = Call(op, args, kwargs)
    try:
        program = Program(call.fn, call.args, call.kwargs)
        program(program.tensors)
    except Exception:
        call.must_raise = True
    with kernels(device, stock=stock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        highest = order + (call.reference is not None)
        stages = all_stages(highest, composed=highest, batched=order)
        outcome = compare(call, where, stages, dtype)
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
