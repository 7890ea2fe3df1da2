"""What a command is pointed at: a function by name, its inputs, and modules as functions of tensors."""

import contextlib
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
from torch.utils import _pytree as pytree

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
    except Exception as error:
        raise ValueError(sentence(target, error)) from error


def sentence(target: str, error: Exception) -> str:
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


def as_function(
    fn: Callable[..., Any], inputs: Sequence[Any], *, copies: bool = True
) -> tuple[Callable[[Sequence[Any]], Any], list[Tensor]]:
    """``fn(*inputs)`` as a function of tensors alone, and those: modules' parameters and buffers first.

    It writes to copies of the buffers, unless ``copies`` is false.
    """
    parts, spec = pytree.tree_flatten((fn, list(inputs)))
    modules = [part for part in parts if isinstance(part, nn.Module)]
    owned = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}

    def function(tensors: Sequence[Any]) -> Any:
        given = iter(tensors)
        # A buffer may be written to, and what was given must stay.
        of = {
            key: next(given).clone() if copies and not t.requires_grad else next(given)
            for key, t in owned.items()
        }
        bound: dict[int, nn.Module] = {}
        leaves = [
            _bind(part, of, bound)
            if isinstance(part, nn.Module)
            else next(given)
            if isinstance(part, Tensor)
            else part
            for part in parts
        ]
        fn, args = pytree.tree_unflatten(leaves, spec)
        return fn(*args)

    return function, [*owned.values(), *(part for part in parts if isinstance(part, Tensor))]


def _bind(module: nn.Module, of: Mapping[int, Tensor], bound: dict[int, nn.Module]) -> nn.Module:
    """A copy of the module with another tensor for each of its own, by their ids, and so within."""
    if id(module) not in bound:
        # Not by copy.copy: a parametrized module refuses it.
        own = bound[id(module)] = module.__new__(type(module))
        own.__dict__ = dict(module.__dict__)
        own._modules = {n: m and _bind(m, of, bound) for n, m in module._modules.items()}
        for name in ("_parameters", "_buffers"):
            tensors = getattr(module, name).items()
            setattr(own, name, {n: t if t is None else of[id(t)] for n, t in tensors})
    return bound[id(module)]
