"""The process that runs cases: `python -m torch_convfix.verify.worker FILE_DESCRIPTOR`."""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from torch_convfix.verify.compare import Outcome, compare
from torch_convfix.verify.conv_cases import ConvCase
from torch_convfix.verify.derivatives import Call, Failure
from torch_convfix.verify.devices import Device, get_device, graph_hash_fault, kernels
from torch_convfix.verify.workers import Ready, Settings, Spell


def make_runner(settings: Settings, device: Device) -> Callable[[Any], Any]:
    """What answers each request."""
    dtype = getattr(torch, settings.dtype) if settings.dtype else device.default_dtype()

    def run(case: Any, call: Call) -> Outcome:
        stages = case.stages(settings.highest)
        return compare(call, device, stages, dtype, settings.tolerance)

    def answer(request: Any) -> Any:
        match request:
            case ConvCase():
                return run(request, request.call())
            case Spell():
                outcome = run(request.case, request.case.call(dtype, redraw=request.redraw))
                return outcome, request.case.spell(dtype, redraw=request.redraw)
        return run(request, request.call(dtype))

    def answer_or_failure(request: Any) -> Any:
        try:
            return answer(request)
        except Exception as e:  # of this case: it must not take the others with it
            return Failure.of(e)

    return answer_or_failure


def main(descriptor: int) -> None:
    """Answer requests until the other end closes."""
    connection = Connection(descriptor)
    settings: Settings = connection.recv()
    for module in settings.imports:
        importlib.import_module(module)
    torch.set_num_threads(1)
    device = get_device(settings.device)
    with kernels(settings.device, stock=settings.stock), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = make_runner(settings, device)
        dtype = settings.dtype or str(device.default_dtype()).removeprefix("torch.")
        fault = settings.device == "xla" and graph_hash_fault()
        connection.send(Ready(dtype, device.traced, fault))
        with contextlib.suppress(EOFError):
            while True:
                connection.send(answer(connection.recv()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
