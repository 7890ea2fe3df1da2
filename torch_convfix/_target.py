"""What a command is pointed at: a function by name, and its inputs."""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HELP = (
    "module:function or file.py:function. With --input a function of these inputs; without, a function "
    "of nothing that returns (function, *inputs), tensors and modules"
)
INPUT_HELP = "32x3x8x8 or 32:int64, once an input, in order"


def check_name(target: str) -> None:
    """Refuse what cannot name a function, before anything is imported."""
    module, _, function = target.rpartition(":")
    if not module or not function:
        raise ValueError(f"target must be module:function or file.py:function, got {target!r}")
    if module.endswith(".py") and not Path(module).is_file():
        raise ValueError(f"target must name a file that is there, got {target!r}")


def _load(target: str) -> Callable[..., Any]:
    check_name(target)
    name, _, function = target.rpartition(":")
    if name.endswith(".py"):
        # A name of its own: a script may be called like a module that it imports.
        spec = importlib.util.spec_from_file_location(f"_target_{Path(name).stem}", name)
        assert spec is not None and spec.loader is not None
        # As `python file.py` does: a script imports its neighbours.
        sys.path.insert(0, str(Path(name).resolve().parent))
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        with _in_one_sentence(target):
            spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(
                f"target must name a module or a .py file that is there, got {target!r}"
            )
        with _in_one_sentence(target):
            module = importlib.import_module(name)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"target must name a function of {name}, got {target!r}")
    return found


def parse_input(text: str) -> Tensor:
    """A random tensor of a spec such as ``32x3x224x224``, zeros of ``32:int64``; floats require
    gradients."""
    shape, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    try:
        sizes = [int(size) for size in shape.split("x")] if shape else []
    except ValueError:
        sizes = [-1]
    if not isinstance(dtype, torch.dtype) or min(sizes, default=0) < 0:
        raise ValueError(
            "input must be sizes joined by x and a dtype of torch's, like 32x3x8x8 or 32:int64, got "
            f"{text!r}"
        )
    try:
        if not dtype.is_floating_point:
            return torch.zeros(sizes, dtype=dtype)
        return torch.randn(sizes).to(dtype).requires_grad_()
    except RuntimeError as error:  # the allocator's, or that of sizes beyond 64 bits
        raise ValueError(f"input must fit into memory, got {text!r}") from error


def resolve(target: str, specs: Sequence[str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that ``target`` names, or that the function it names returns, and its inputs."""
    inputs = tuple(map(parse_input, specs))
    function = _load(target)
    _check_call(target, function, inputs)
    if specs:
        return function, inputs
    with _in_one_sentence(target):
        made = function()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise ValueError(
            f"{target} must return (function, *inputs) where no --input is given, got "
            f"{type(made).__name__}"
        )
    function, *rest = made
    inputs = (
        tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else tuple(rest)
    )
    _check_call(f"the function of {target}", function, inputs)
    return function, inputs


@contextlib.contextmanager
def _in_one_sentence(target: str) -> Iterator[None]:
    """What the target's own code raises, as the error of a name that cannot be used."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(sentence(target, error)) from error


def sentence(target: str, error: BaseException) -> str:
    """What the target's own code raised."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{target} raises {type(error).__name__}: {line}"


def _check_call(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(getattr(function, "forward", function))
    except ValueError:  # a builtin
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise ValueError(f"{name}{signature} was given {len(inputs)} inputs: {error}") from error
