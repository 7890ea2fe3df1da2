"""The process of one member: `member.py NAME DEVICE ours|stock FILE ROW...` writes a line of JSON a row."""

import functools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import derivatives
import libraries
import members
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_convfix import _devices
from torch_convfix._as_function import as_function
from torch_convfix.verify.compare import TOLERANCES, worst_error
from torch_convfix.verify.derivatives import Failure
from torch_convfix.verify.devices import Device, get_device, kernels

Results = dict[str, Tensor]
Step = Callable[[Sequence[Tensor]], Results]


@dataclass
class Row:
    """What became of a row."""

    row: str
    verdict: str  # one of VERDICTS
    error: float = 0.0
    detail: str = ""


RIGHT, WRONG, RAISES = "right", "wrong", "raises"
CPU_TOO, DIES, NOT_TRACEABLE = "the CPU raises too", "ends the process", "not traceable"
NOT_INSTALLED, REFUSED = "not installed", "the library refuses"
# What TorchTPU says where a value, a random number or a copy is asked of a TPU that is not there.
_ASKS_A_TPU = ("during an FX trace", "TPU initialization failed", "getNewGenerator")
VERDICTS = (RIGHT, WRONG, RAISES, DIES, CPU_TOO, NOT_TRACEABLE, REFUSED, NOT_INSTALLED)
NO_FAULT = {RIGHT, CPU_TOO, NOT_TRACEABLE, REFUSED}


def rows_of(name: str) -> list[str]:
    """The rows of a member."""
    return [libraries.CALL] if name in libraries.LIBRARIES else list(members.NETS[name].rows)


def prepare(name: str, rows: Sequence[str]) -> tuple[dict[str, Callable[[], Step]], list[Tensor]]:
    """The steps of the rows as functions of tensors, each made anew for every run, and the tensors."""
    torch.manual_seed(0)
    if name in libraries.LIBRARIES:
        make, net = libraries.make, libraries.make()
        inputs: tuple[Any, ...] = libraries.inputs(net)
        steps = {row: libraries.LIBRARIES[name] for row in rows}
    else:
        make = functools.partial(members.make, members.NETS[name])
        net = make()
        inputs = derivatives.inputs(net, (members.BATCH, *members.NETS[name].shape))
        steps = {row: derivatives.ROWS[row] for row in rows}

    def made(step: Callable[..., Any]) -> Step:
        # A library may leave its hooks in the module.
        function, _ = as_function(step, (make(), *inputs))
        return lambda tensors: _named(function(tensors))

    tensors = as_function(make, (net, *inputs))[1]
    return {row: functools.partial(made, step) for row, step in steps.items()}, tensors


def _named(results: Any) -> Results:
    if not isinstance(results, dict):
        leaves = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
        results = {f"output {i}": t for i, t in enumerate(leaves)}
    return {name: t.detach() for name, t in results.items()}


def _evaluate(step: Callable[[], Step], tensors: Sequence[Tensor]) -> Results | Failure:
    try:
        return step()(tensors)
    except Exception as e:
        return Failure.of(e)


def _on_cpu(step: Callable[[], Step], tensors: Sequence[Tensor]) -> Results | Failure:
    return _evaluate(step, [_cast(t, torch.float64) for t in tensors])


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    copy = t.detach().to(dtype if t.is_floating_point() else t.dtype, copy=True)
    return copy.requires_grad_(t.requires_grad)


def _on_device(
    steps: dict[str, Callable[[], Step]], device: Device, tensors: Sequence[Tensor]
) -> dict[str, Results | Failure]:
    """All rows in one step, which share their forward, or each alone where that does not run."""
    results: dict[str, Results | Failure] = {}

    def body(given: Sequence[Tensor]) -> list[Tensor]:
        for row, step in steps.items():
            results[row] = _evaluate(step, given)
        return [t for r in results.values() if isinstance(r, dict) for t in r.values()]

    try:
        outputs = iter(device.run(body, tensors))
    except Exception as e:
        if len(results) == len(steps) and all(isinstance(r, Failure) for r in results.values()):
            return results  # the error is that nothing was left to run
        if len(steps) == 1:
            return dict.fromkeys(steps, Failure.of(e))
        alone = [_on_device({row: step}, device, tensors) for row, step in steps.items()]
        return {row: r for one in alone for row, r in one.items()}
    return {
        row: r if isinstance(r, Failure) else {name: next(outputs) for name in r}
        for row, r in results.items()
    }


def compare(
    steps: dict[str, Callable[[], Step]], tensors: Sequence[Tensor], device: Device
) -> list[Row]:
    """Every row on the device against float64 on the CPU."""
    dtype = device.default_dtype()
    tensors = [_cast(t, dtype) for t in tensors]
    want = {row: _on_cpu(step, tensors) for row, step in steps.items()}
    refused = {row: r.line for row, r in want.items() if isinstance(r, Failure)}
    with _devices.enabled("cpu"):  # the derivatives that PyTorch lacks
        want |= {row: _on_cpu(steps[row], tensors) for row in refused}
    known = {row: step for row, step in steps.items() if isinstance(want[row], dict)}
    got = _on_device(known, device, tensors) if known else {}
    return [_row(row, got.get(row), want[row], dtype, refused.get(row, "")) for row in steps]


def _row(
    row: str,
    got: Results | Failure | None,
    want: Results | Failure,
    dtype: torch.dtype,
    refused: str,
) -> Row:
    if isinstance(want, Failure) or (refused and isinstance(got, Failure)):
        missing = refused.startswith(ModuleNotFoundError.__name__)
        return Row(row, NOT_INSTALLED if missing else CPU_TOO, detail=refused)
    if not isinstance(got, dict):
        line = got.line if got else ""
        asked = any(part in line for part in _ASKS_A_TPU)
        return Row(row, NOT_TRACEABLE if asked else RAISES, detail=line)
    if not any(t.count_nonzero() for t in want.values()):
        return Row(row, WRONG, detail="nothing to compare: all results are zero")
    error, worst = worst_error(got, want, 0.0)
    if error > TOLERANCES[dtype]:
        return Row(row, WRONG, error, worst)
    return Row(row, RIGHT, error, f"the CPU raises: {refused}" if refused else "")


def main(name: str, where: str, which: str, file: str, rows: Sequence[str]) -> None:
    """Compare, and append to the file."""
    torch.set_num_threads(1)
    device = get_device(where)
    with kernels(where, stock=which == "stock"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compare(*prepare(name, rows), device)
    with open(file, "a") as output:
        output.writelines(json.dumps(asdict(_judged(row, name, where))) + "\n" for row in found)


def _judged(row: Row, name: str, where: str) -> Row:
    said = libraries.REFUSED.get((name, where))
    if said and row.verdict == RAISES and said in row.detail:
        return replace(row, verdict=REFUSED)
    return row


if __name__ == "__main__":
    main(*sys.argv[1:5], rows=sys.argv[5:])
