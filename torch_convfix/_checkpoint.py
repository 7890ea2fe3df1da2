"""Recomputation in the place of memory, of derivatives of every order."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_convfix._as_function import as_function

Function = Callable[[Sequence[Tensor]], list[Tensor]]
Conditions = Callable[[], contextlib.AbstractContextManager[None]]

_TENSOR = object()  # in the place of a tensor in a result, which is the caller's to keep
_RESULTS = (Tensor, NoneType, bool, Number, str, torch.dtype, torch.device, torch.Size)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, of which nothing is kept for a derivative but the arguments.

    The derivative computes the function again, and is itself checkpointed, so that a second derivative
    keeps nothing of it either, and so on. With ``torch.utils.checkpoint`` a second derivative keeps all
    that the first has recomputed; and on XLA the compiler recognizes the recomputation as the forward it
    repeats and computes both once, which saves nothing. Here it waits for the gradient, behind
    StableHLO's ``optimization_barrier``.

    Chen et al., 2016, https://arxiv.org/abs/1604.06174; JAX's ``jax.checkpoint`` composes likewise.

    Args:
        function: a module, or a function of tensors and modules, that does not differentiate within
            itself. It is run again with its modules, generators and autocast as they were, and with the
            buffers that its modules had before: one that is written in place, as batch norm's running
            statistics are, is written once. What it closes over is as it then is, and is written again.
        args: tensors, modules, generators, and lists and dictionaries of them, or anything else that is
            no tensor.

    Returns:
        What ``function`` returns: tensors, numbers, strings and None, and lists and dictionaries of them.
        Every floating tensor requires a gradient where an argument does, a detached one too: it is zero.

    Raises:
        TypeError: if the result holds anything else.
        ValueError: if the result requires a gradient by a tensor that ``function`` closes over, if an
            argument is written in place, or if a module keeps a tensor as an attribute.
        NotImplementedError: for a ``torch.jit.ScriptModule``; within a transform of ``torch.func``, as
            ``torch.utils.checkpoint`` does, and for a gradient within one, as ``is_grads_batched``.
    """
    _refuse_transforms()
    if not torch.is_grad_enabled():
        return function(*args)
    of_tensors, tensors = as_function(function, args)
    spec: list[pytree.TreeSpec] = []
    leaves: list[Any] = []

    def forward(given: Sequence[Tensor]) -> list[Tensor]:
        parts, tree = pytree.tree_flatten(of_tensors(given, copies=False))
        for part in parts:
            if not isinstance(part, _RESULTS):
                raise TypeError(
                    "function must return tensors, numbers, strings and None, in lists and "
                    f"dictionaries, got {type(part).__name__}"
                )
        spec.append(tree)
        leaves.extend(_TENSOR if isinstance(part, Tensor) else part for part in parts)
        # A view of an argument would not be differentiated as one.
        found = [part for part in parts if isinstance(part, Tensor)]
        return [part.clone() if part._is_view() else part for part in found]

    def again(given: Sequence[Tensor]) -> list[Tensor]:
        return [part for part in pytree.tree_leaves(of_tensors(given)) if isinstance(part, Tensor)]

    parts = pytree.tree_leaves((function, args))
    buffers = {id(b) for m in parts if isinstance(m, nn.Module) for b in m.buffers()}
    conditions = _conditions(tensors, [part for part in parts if isinstance(part, torch.Generator)])
    results = iter(_Checkpoint.apply(forward, again, conditions, buffers, *tensors))
    return pytree.tree_unflatten(
        [next(results) if part is _TENSOR else part for part in leaves], spec[0]
    )


def _refuse_transforms(*tensors: Tensor) -> None:
    batched = any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    if batched or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "checkpoint works with torch.autograd, not within a transform of torch.func nor with "
            "is_grads_batched"
        )


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Function,
        again: Function,
        conditions: Conditions,
        buffers: set[int],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.again, ctx.conditions = again, conditions
        written = [id(t) in buffers and not t.requires_grad for t in tensors]
        kept = [t.clone() if w else t for t, w in zip(tensors, written, strict=True)]
        ctx.save_for_backward(*kept)
        before = _versions(kept)
        with torch.enable_grad():
            results = function([t.detach() if t.requires_grad else t for t in tensors])
        if before != _versions(kept):
            raise ValueError("args must not be written in place by function: clone them there")
        if any(t.requires_grad for t in results):
            raise ValueError(
                "function must compute with its arguments alone: its result requires a gradient by a "
                "tensor that it closes over; a module can be an argument"
            )
        ctx.mark_non_differentiable(*(t for t in results if not _differentiable(t)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        _refuse_transforms(*(g for g in grad_outputs if g is not None))
        again, conditions, needs = ctx.again, ctx.conditions, ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors
        count = len(saved)
        present = [i for i, g in enumerate(grad_outputs) if g is not None]
        used: list[bool] = []

        def vjp(given: Sequence[Tensor]) -> list[Tensor]:
            inputs = _after(given[:count], given[count:])
            inputs = [_leaf(t, need) for t, need in zip(inputs, needs, strict=True)]
            with torch.enable_grad(), conditions():
                results = again(inputs)
            all_pairs = [(results[i], g) for i, g in zip(present, given[count:], strict=True)]
            pairs = [(result, g) for result, g in all_pairs if result.requires_grad]
            sources = [t for t, need in zip(inputs, needs, strict=True) if need]
            found = (
                torch.autograd.grad(
                    [result for result, _ in pairs],
                    sources,
                    [g for _, g in pairs],
                    create_graph=any(t.requires_grad for t in given),
                    allow_unused=True,
                )
                if pairs
                else [None] * len(sources)
            )
            used[:] = [g is not None for g in found]
            # At once: a gradient that is left for later keeps what it is computed from.
            return _after([g for g in found if g is not None], ())

        given = [*saved, *(g for g in grad_outputs if g is not None)]
        if torch.is_grad_enabled():
            found = iter(_Checkpoint.apply(vjp, vjp, conditions, set(), *given))
        else:
            found = iter(vjp([t.detach() for t in given]))
        those = iter(used)
        return (*[None] * 4, *(next(found) if n and next(those) else None for n in needs))


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written in place, of those that count it."""
    return [t._version for t in tensors if not t.is_inference()]


def _differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _leaf(t: Tensor, need: bool) -> Tensor:
    return t.detach().requires_grad_() if need and not t.requires_grad else t


def _after(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as they are, but on XLA there only after all of them and the others are."""
    result = list(tensors)
    places = [i for i, t in enumerate(tensors) if t.device.type in ("tpu", "xla")]
    if places:
        awaited = [t for t in others if t.device.type in ("tpu", "xla")]
        behind = _Barrier.apply(len(places), *(tensors[i] for i in places), *awaited)
        for i, t in zip(places, behind, strict=True):
            result[i] = t
    return result


class _Barrier(torch.autograd.Function):
    """The first ``count`` tensors, behind a barrier that waits for all."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.others = len(tensors) - count
        if tensors[0].device.type == "tpu":
            behind = torch.ops.tpu._optimization_barrier(list(tensors))
        else:
            behind = [t.clone() for t in tensors]
            importlib.import_module("torch_xla")._XLAC._xla_optimization_barrier_(behind)
        # As it would be without: batch norm refuses statistics that require a gradient.
        pairs = zip(behind[:count], ctx.needs_input_grad[1:], strict=False)
        ctx.mark_non_differentiable(*(t for t, need in pairs if not need))
        return tuple(behind[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grad_outputs, *[None] * ctx.others)


def _conditions(tensors: Sequence[Tensor], generators: Sequence[torch.Generator]) -> Conditions:
    """A context with the generators, PyTorch's and these, and autocast as they are now."""
    device = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    kind = device.type if device else "cpu"
    casts = [
        (k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k))
        for k in {kind, "cpu"}
        if torch.amp.is_autocast_available(k)
    ]
    state = torch.get_rng_state()
    own = [(generator, generator.get_state()) for generator in generators]
    module: Any = getattr(torch, kind, None)
    states: dict[int, Tensor] = {}
    if device and getattr(module, "_initialized", False):
        ids = {t.get_device() for t in tensors if t.device.type == kind}
        states = {i: module.get_rng_state(i) for i in ids}

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(list(states), device_type=kind))
            torch.set_rng_state(state)
            for i, value in states.items():
                module.set_rng_state(value, i)
            for generator, value in own:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(value)
            for k, dtype, enabled in casts:
                stack.enter_context(torch.autocast(k, dtype, enabled))
            yield

    return again
