"""Recomputation in the place of memory, of derivatives of every order."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_convfix._target import as_function

Function = Callable[[Sequence[Tensor]], list[Tensor]]


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, of which nothing is kept for a derivative but the arguments.

    The derivative computes the function again, and is itself checkpointed, so that a second derivative
    keeps nothing of it either, and so on. With ``torch.utils.checkpoint`` a second derivative keeps all
    that the first has recomputed; and on XLA the compiler recognizes the recomputation as the forward it
    repeats and computes both once, which saves nothing. Here it waits for the gradient, behind
    StableHLO's ``optimization_barrier``.

    Chen et al., 2016, https://arxiv.org/abs/1604.06174; JAX's ``jax.checkpoint`` composes likewise.

    Args:
        function: a module, or a function of tensors and modules. It is run again with the generators and
            autocast as they were, and with the buffers that its modules had before: one that is written
            in place, as batch norm's running statistics are, is written once.
        args: tensors, modules, and lists and dictionaries of them, or anything else that is no tensor.

    Returns:
        What ``function`` returns: tensors, and lists and dictionaries of them.

    Raises:
        ValueError: if the result requires a gradient by a tensor that ``function`` closes over.
        NotImplementedError: within a transform of ``torch.func``, as ``torch.utils.checkpoint`` does.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "checkpoint works with torch.autograd, not within a transform of torch.func"
        )
    written, tensors = as_function(function, args, copies=False)
    again, _ = as_function(function, args)
    spec: list[pytree.TreeSpec] = []
    leaves: list[Any] = []

    def forward(given: Sequence[Tensor]) -> list[Tensor]:
        parts, tree = pytree.tree_flatten(written(given))
        spec.append(tree)
        leaves.extend(parts)
        return [part for part in parts if isinstance(part, Tensor)]

    def recompute(given: Sequence[Tensor]) -> list[Tensor]:
        return [part for part in pytree.tree_leaves(again(given)) if isinstance(part, Tensor)]

    modules = [part for part in pytree.tree_leaves((function, args)) if isinstance(part, nn.Module)]
    buffers = {id(buffer) for module in modules for buffer in module.buffers()}
    results = iter(_Checkpoint.apply(forward, recompute, buffers, *tensors))
    return pytree.tree_unflatten(
        [next(results) if isinstance(part, Tensor) else part for part in leaves], spec[0]
    )


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Function, recompute: Function, buffers: set[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recompute, ctx.conditions = recompute, _conditions(tensors)
        ctx.save_for_backward(*(t.clone() if id(t) in buffers else t for t in tensors))
        with torch.enable_grad():
            results = function([t.detach() if t.requires_grad else t for t in tensors])
        if any(t.requires_grad for t in results):
            raise ValueError(
                "function must compute with its arguments alone: its result requires a gradient by a "
                "tensor that it closes over; a module can be an argument"
            )
        ctx.mark_non_differentiable(*(t for t in results if not _differentiable(t)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        needs, conditions, recompute = ctx.needs_input_grad[3:], ctx.conditions, ctx.recompute
        saved = ctx.saved_tensors
        used: list[bool] = []

        def vjp(given: Sequence[Tensor]) -> list[Tensor]:
            inputs = _after(given[: len(saved)], given[len(saved) :])
            inputs = [_leaf(t, need) for t, need in zip(inputs, needs, strict=True)]
            with torch.enable_grad(), conditions():
                results = recompute(inputs)
            all_pairs = zip(results, given[len(saved) :], strict=True)
            pairs = [(result, g) for result, g in all_pairs if result.requires_grad]
            found = torch.autograd.grad(
                [result for result, _ in pairs],
                [t for t, need in zip(inputs, needs, strict=True) if need],
                [g for _, g in pairs],
                create_graph=any(t.requires_grad for t in given),
                allow_unused=True,
            )
            used[:] = [g is not None for g in found]
            return [g for g in found if g is not None]

        given = (*saved, *grad_outputs)
        if torch.is_grad_enabled():
            found = iter(_Checkpoint.apply(vjp, vjp, set(), *given))
        else:
            found = iter(vjp([t.detach() for t in given]))
        those = iter(used)
        return (None, None, None, *(next(found) if n and next(those) else None for n in needs))


def _differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _leaf(t: Tensor, need: bool) -> Tensor:
    return t.detach().requires_grad_() if need and not t.requires_grad else t


def _after(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as they are, but on XLA there only after the others are."""
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
            return tuple(torch.ops.tpu._optimization_barrier(list(tensors))[:count])
        copies = [t.clone() for t in tensors]
        importlib.import_module("torch_xla")._XLAC._xla_optimization_barrier_(copies)
        return tuple(copies[:count])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *grad_outputs, *[None] * ctx.others)


def _conditions(tensors: Sequence[Tensor]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context with the generators and autocast as they are now."""
    device = next((t.device for t in tensors if t.device.type not in ("cpu", "meta")), None)
    kind = device.type if device else "cpu"
    casts = [
        (k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k))
        for k in {kind, "cpu"}
        if torch.amp.is_autocast_available(k)
    ]
    state = torch.get_rng_state()
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
            for k, dtype, enabled in casts:
                stack.enter_context(torch.autocast(k, dtype, enabled))
            yield

    return again
