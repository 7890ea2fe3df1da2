"""The calls that a target makes: each torch function that its own code calls, seen once."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
)
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

_functorch: Any = torch._C._functorch  # its stubs lack half of it

_DIFFERENTIATE = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
# Not calls of the forward: they differentiate, or change what is differentiated.
_SKIPPED = {*_DIFFERENTIATE, torch.Tensor.detach, torch.Tensor.requires_grad_}

_LETTERS = {"Grad": "R", "Jvp": "F"}

Slot = tuple[
    int, int
]  # a call's index, and the place among the tensors of its arguments and result


class Watch(TorchFunctionMode):
    """Counts the calls, and keeps the leaves that they make: what the target itself makes differentiable.

    A custom `torch.autograd.Function` is one call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.made: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A context whose calls are seen."""
        plain = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            with torch._C.DisableTorchFunction():  # what it does inside is not the target's own
                return self._see(functools.partial(plain, cls), args, kwargs, cls.__name__)

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)), self:
            yield

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._see(func, args, kwargs or {})

    def _see(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], custom: str = "") -> Any:
        index = self.count
        self.count += 1
        differentiable = {id(t) for t in tensors_of(args, kwargs) if t.requires_grad}
        result = self.call(index, fn, args, kwargs, custom)
        for t in tensors_of(args, kwargs, result):
            if t.requires_grad and t.is_leaf and id(t) not in differentiable and not _wrapped(t):
                differentiable.add(id(t))
                self.made.append(t)
        return result

    def call(
        self, index: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], custom: str
    ) -> Any:
        """Run one call; for subclasses to look on. ``custom`` is the name of a custom Function."""
        return fn(*args, **kwargs)


@dataclass
class Recorded:
    """One call of the forward, with copies of the inputs that it had."""

    index: int
    name: str
    where: str  # file:line of the caller
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    custom: bool
    word: str  # the transforms of torch.func around it that differentiate, as `transforms.WORDS`
    feeds: list[str] = field(default_factory=list)  # the calls that made or wrote its inputs
    live: list[Slot] = field(default_factory=list)  # tensors after it that no call has used yet

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"


@dataclass
class _Gradient:
    after: int  # the index of the call before it
    nodes: list[Any]  # of the graph of its results
    through: list[int]  # earlier ones whose results it differentiates


class Recorder(Watch):
    """Keeps each call of the forward. For a target on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []
        self.random = ""  # the first call that draws random numbers
        self._gradients: list[_Gradient] = []
        self._of_node: dict[Any, int] = {}
        self._live: dict[int, list[tuple[Slot, Tensor]]] = {}  # by memory
        self._writer: dict[int, str] = {}  # the last call that made or wrote it, by memory
        self._held: list[Tensor] = []  # memory that is let go could be another tensor's

    def call(
        self, index: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], custom: str
    ) -> Any:
        """Run one call and keep it."""
        if fn in _DIFFERENTIATE:
            result = fn(*args, **kwargs)
            self._add_gradient(index, result, *args, **kwargs)
            return result
        where = _caller()
        copied = fn is torch.Tensor.clone and where == _OURS
        if fn in _SKIPPED or where is None or copied:
            return fn(*args, **kwargs)
        name = name_of(fn, custom)
        kept = pytree.tree_map_only(Tensor, _copied, (args, kwargs))
        given = tensors_of(args, kwargs)
        before = [_state(t) for t in given]
        drawn = torch.get_rng_state()
        result = fn(*args, **kwargs)
        if not self.random and not torch.equal(drawn, torch.get_rng_state()):
            self.random = f"{name} at {where}"
        written = [i for i, t in enumerate(given) if _state(t) != before[i]]
        made = {len(given) + i: t for i, t in enumerate(tensors_of(result))}
        after = {i: t for i, t in ({i: given[i] for i in written} | made).items() if _is_float(t)}
        if after and not name.endswith("__get__"):
            letters = [_LETTERS.get(kind, "") for kind in reversed(transforms_around())]
            word = "".join(letters)
            call = Recorded(index, name, where, fn, kept[0], kept[1], bool(custom), word)
            self._trace(call, given, after, written)
            self.calls.append(call)
        return result

    def _trace(
        self, call: Recorded, given: list[Tensor], after: dict[int, Tensor], written: list[int]
    ) -> None:
        """Where its inputs are from, and what no call has used after it."""
        feeds = [self._writer[m] for m in map(_memory, given) if m in self._writer]
        call.feeds = list(dict.fromkeys(feeds))
        self._live = {
            m: [(s, t) for s, t in live if not _is_over(t)] for m, live in self._live.items()
        }
        there = {_memory(t) for t in after.values()}
        for t in given:
            used = not is_tracked(t) or any(map(is_tracked, after.values()))
            if used and _memory(t) not in there:
                self._live.pop(_memory(t), None)
        for i, t in after.items():
            if i in written:
                self._writer[_memory(t)] = f"{call}, in place"
                self._live[_memory(t)] = [((call.index, i), t)]
            elif all(t is not x for x in given):
                self._live.setdefault(_memory(t), []).append(((call.index, i), t))
                if all(_memory(t) != _memory(x) for x in given):
                    self._writer[_memory(t)] = str(call)
        self._held += map(_raw, (*given, *after.values()))
        call.live = [slot for live in self._live.values() for slot, _ in live]

    def _add_gradient(
        self, index: int, result: Any, outputs: Any, inputs: Any = (), *_: Any, **__: Any
    ) -> None:
        if transforms_around():
            return  # their own
        ends = {id(t) for t in tensors_of(inputs)}
        stop = {t.grad_fn for t in tensors_of(inputs)}
        todo: list[Any] = [t.grad_fn for t in tensors_of(outputs)]
        seen: set[Any] = {None}
        through: set[int] = set()
        while todo:
            node = todo.pop()
            if node in seen or node in stop or id(getattr(node, "variable", None)) in ends:
                continue
            seen.add(node)
            if node in self._of_node:
                through.add(self._of_node[node])
            todo += [n for n, _ in node.next_functions]
        nodes = [t.grad_fn for t in tensors_of(result) if t.grad_fn is not None]
        self._of_node |= dict.fromkeys(nodes, len(self._gradients))
        self._gradients.append(_Gradient(index, nodes, sorted(through)))

    def differentiated_after(self, call: Recorded) -> int:
        """How often the target itself differentiates what the call returns."""
        chain: dict[int, int] = {}
        for i, gradient in enumerate(self._gradients):
            if gradient.after > call.index:
                chain[i] = 1 + max((chain.get(j, 0) for j in gradient.through), default=0)
        return max(chain.values(), default=0)


def tensors_of(*trees: Any) -> list[Tensor]:
    """The tensors within, in order."""
    return [t for t in pytree.tree_leaves(trees) if isinstance(t, Tensor)]


def name_of(fn: Any, custom: str) -> str:
    """How a call is named."""
    return custom or resolve_name(fn) or getattr(fn, "__name__", repr(fn))


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def transforms_around() -> list[str]:
    """The transforms of torch.func that are under way, outermost first."""
    return [i.key().name for i in retrieve_all_functorch_interpreters()]


def _wrapped(t: Tensor) -> bool:
    return _functorch.is_functorch_wrapped_tensor(t)


def is_tracked(t: Tensor) -> bool:
    """Whether something differentiates it: autograd, or a transform of torch.func around the call."""
    if _wrapped(t) and "Jvp" in transforms_around() and "Grad" not in transforms_around():
        return True  # which of the wrapped ones have a tangent is not told
    while _wrapped(t) and not t.requires_grad:
        t = _functorch.get_unwrapped(t)
    return t.requires_grad


def _is_over(t: Tensor) -> bool:
    """Whether it belongs to a transform that has ended."""
    return _wrapped(t) and (
        _functorch.is_dead_tensor_wrapper(t)
        or _functorch.maybe_get_level(t) > len(transforms_around())
    )


def _raw(t: Tensor) -> Tensor:
    while _wrapped(t):
        t = _functorch.get_unwrapped(t)
    return t


def _copied(t: Tensor) -> Tensor:
    """A copy, of the first sample where torch.func.vmap batches it."""
    tracked = is_tracked(t) and _is_float(t)
    with temporarily_clear_interpreter_stack():
        dims = []
        while _wrapped(t):
            dims += [_functorch.maybe_get_bdim(t)] if _functorch.is_batchedtensor(t) else []
            t = _functorch.get_unwrapped(t)
        t = t.detach()
        for dim in reversed(dims):  # each counts the dimensions that the layers within it left
            t = t.select(dim, 0)
        return t.clone().requires_grad_(tracked)


def _memory(t: Tensor) -> int:
    t = _raw(t)
    return t.untyped_storage().data_ptr() if t.layout == torch.strided and t.numel() else id(t)


def _state(t: Tensor) -> tuple[int, int]:
    """Changes when the tensor is written, or given other data."""
    return _raw(t)._version, _memory(t)


def _caller() -> str | None:
    """The innermost line of the target that is not torch's, else its module of torch's.

    None where torch itself calls, within a transform or a derivative of its own.
    """
    frame: FrameType | None = sys._getframe(1)
    module = ""
    while frame is not None and not (name := frame.f_code.co_filename).endswith(_BOUNDARY):
        if not module and any(part in name for part in _TRANSFORMS):
            return None
        if "/torch/nn/modules/" in name:
            module = module or f"{name}:{frame.f_lineno}"
        elif not any(part in name for part in _NOT_THE_TARGETS):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return module or _OURS


_OURS = "?"  # the target itself is a torch function, or we copy a buffer
_BOUNDARY = "/torch_convfix/_as_function.py"
_TRANSFORMS = ("/torch/_functorch/", "/torch/autograd/")
_NOT_THE_TARGETS = ("/torch/", "/torch_convfix/", "/unittest/", "/contextlib.py")
