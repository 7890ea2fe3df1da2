"""What a command is pointed at: a function by name, its inputs, and modules as functions of tensors."""

import copy
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None
        # As `python file.py` does: a script imports its neighbours.
        sys.path.insert(0, str(Path(name).resolve().parent))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(name)
    if not hasattr(module, function):
        raise ValueError(f"target must name a function of {name}, got {target!r}")
    return getattr(module, function)


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
    if not dtype.is_floating_point:
        return torch.zeros(sizes, dtype=dtype)
    return torch.randn(sizes).to(dtype).requires_grad_()


def resolve(target: str, specs: Sequence[str]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that ``target`` names, or that the function it names returns, and its inputs."""
    inputs = tuple(map(parse_input, specs))
    function = _load(target)
    _check_call(target, function, inputs)
    if specs:
        return function, inputs
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


def _check_call(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin
        return
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise ValueError(f"{name}{signature} was given {len(inputs)} inputs: {error}") from error


def as_function(
    fn: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Callable[[Any], Any], tuple[Any, list[Any]]]:
    """``fn(*inputs)`` as a function of tensors alone: a module becomes its parameters and buffers."""

    def bound(part: Any, state: Any) -> Any:
        if not isinstance(part, nn.Module):
            return state
        return _bind(part, {id(t): state[name] for name, t in _state(part).items()})

    def function(tensors: Any) -> Any:
        own, states = tensors
        given = [bound(part, state) for part, state in zip(inputs, states, strict=True)]
        return (bound(fn, own) if isinstance(fn, nn.Module) else fn)(*given)

    return function, (_state(fn) if isinstance(fn, nn.Module) else {}, list(map(_state, inputs)))


def _state(part: Any) -> Any:
    if not isinstance(part, nn.Module):
        return part
    return dict([*part.named_parameters(), *part.named_buffers()])


def _bind(module: nn.Module, of: Mapping[int, Tensor]) -> nn.Module:
    """A copy of the module with another tensor for each of its own, by their ids."""
    bound = copy.copy(module)
    bound._parameters, bound._buffers = {}, {}
    bound._modules = {name: m and _bind(m, of) for name, m in module._modules.items()}
    for name, t in (*module._parameters.items(), *module._buffers.items()):
        object.__setattr__(bound, name, None if t is None else of[id(t)])

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return ((name, of[id(t)]) for name, t in module.named_parameters(*args, **kwargs))

    def parameters(recurse: bool = True) -> Iterator[Tensor]:
        return (of[id(t)] for t in module.parameters(recurse))

    object.__setattr__(bound, "named_parameters", named_parameters)
    object.__setattr__(bound, "parameters", parameters)
    return bound
