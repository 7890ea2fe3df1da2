"""Every derivative of one call, on whatever device its tensors are."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Failure:
    """What a stage raised. The exception would keep its frames, and so half-built tensors, alive."""

    line: str

    @classmethod
    def of(cls, e: Exception) -> "Failure":
        """The first line of the exception, as Python prints it."""
        return cls("".join(traceback.format_exception_only(e)).strip().splitlines()[0][:300])


Draw = Callable[[str, Tensor], Tensor]

VALUE: Final = "value"
FORWARD_MODE = "forward mode"
VMAP = "vmap"
VMAP_GRAD = "vmap of gradient"


def order_stage(order: int) -> str:
    """The stage's name: 0 is the value."""
    return f"order {order}" if order else VALUE


def all_stages(highest: int) -> list[str]:
    """The stages up to an order."""
    return [*map(order_stage, range(highest + 1)), FORWARD_MODE, VMAP, VMAP_GRAD]


@dataclass
class Call:
    """A function and its arguments; the tensors that require a gradient are differentiated."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None  # an independent formula for the same value
    must_raise: bool = False  # what the CPU refuses, a device must refuse


class Program:
    """A call as a function of its tensors alone, in the order of `tensors`."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._fn = fn
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [self._leaves[i] for i in self._places]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor.clone()  # a call in place must not reach the caller's tensors
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        outputs = [
            t for t in pytree.tree_leaves(self._fn(*args, **kwargs)) if isinstance(t, Tensor)
        ]
        return list(map(_real, outputs))


def _real(t: Tensor) -> Tensor:
    if t.layout is not torch.strided:
        t = t.to_dense()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def random_like(seed: int, like: Tensor) -> Tensor:
    """Standard normal numbers on the CPU, the same ones for the same seed, shape and dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def evaluate(
    program: Program,
    tensors: Sequence[Tensor],
    stages: Sequence[str],
    draw: Draw,
    *,
    vmap: bool = True,
) -> dict[str, Results | Failure]:
    """The results of each stage, or what it raised; the orders after a raise are left out.

    Order 1 is the vector-Jacobian product with ``v``; order 2 that of order 1 with ``u``, with
    respect to the inputs and ``v``; and so on. ``draw(name, like)`` gives these cotangents. Without
    ``vmap`` a loop takes its place.
    """
    names = [f"input {i}" for i, t in enumerate(tensors) if t.requires_grad]
    x = [t for t in tensors if t.requires_grad]

    def function(*x: Tensor) -> tuple[Tensor, ...]:
        own = iter(x)
        return tuple(program([next(own) if t.requires_grad else t for t in tensors]))

    results: dict[str, Results | Failure] = {}
    steps = _orders(function, dict(zip(names, x, strict=True)), stages, draw)
    stage = VALUE
    try:
        for stage, result in steps:
            results[stage] = result
            stage = _next_order(stage)
    except Exception as e:
        results[stage] = Failure.of(e)
    if (
        not x
        or isinstance(results[VALUE], Failure)
        or not {FORWARD_MODE, VMAP, VMAP_GRAD} & {*stages}
    ):
        return results
    over_batches = torch.func.vmap if vmap else _loop
    batches = _batches(x)
    cotangents = [
        draw(f"{name} under vmap", torch.stack([y, y]))
        for name, y in results[VALUE].items()
        if y.is_floating_point()
    ]
    transforms = {
        FORWARD_MODE: lambda: _jvp(function, x, draw),
        VMAP: lambda: over_batches(function)(*batches),
        VMAP_GRAD: lambda: over_batches(_gradient(function, len(x)))(*batches, *cotangents),
    }
    for stage, transform in transforms.items():
        if stage in stages:
            try:
                results[stage] = _named(transform())
            except Exception as e:
                results[stage] = Failure.of(e)
    return results


def _next_order(stage: str) -> str:
    return order_stage(1 if stage == VALUE else int(stage.split()[1]) + 1)


def _named(outputs: Sequence[Tensor]) -> Results:
    return {f"output {i}": t.detach() for i, t in enumerate(outputs)}


def _orders(
    function: Callable[..., tuple[Tensor, ...]],
    variables: dict[str, Tensor],
    stages: Sequence[str],
    draw: Draw,
) -> Iterator[tuple[str, Results]]:
    results = {f"output {i}": y for i, y in enumerate(function(*variables.values()))}
    yield VALUE, {name: y.detach() for name, y in results.items()}
    highest = max((int(s.split()[1]) for s in stages if s.startswith("order ")), default=0)
    for order in range(1, highest + 1 if variables else 1):
        cotangents = {
            name: draw(f"{name} at order {order}", y).detach().requires_grad_()
            for name, y in results.items()
            if y.is_floating_point()
        }
        outputs = [name for name in cotangents if results[name].requires_grad]
        gradients: Sequence[Tensor | None] = [None] * len(variables)
        if outputs:
            gradients = torch.autograd.grad(
                [results[name] for name in outputs],
                list(variables.values()),
                [cotangents[name] for name in outputs],
                create_graph=order < highest,
                allow_unused=True,
            )
        results = {
            name: _real(torch.zeros_like(v) if g is None else g)
            for (name, v), g in zip(variables.items(), gradients, strict=True)
        }
        yield order_stage(order), {name: g.detach() for name, g in results.items()}
        for name, cotangent in cotangents.items():
            variables[f"cotangent {order} of {name}"] = cotangent


def _floating(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [y for y in outputs if y.is_floating_point()]


def _jvp(function: Callable[..., Any], x: list[Tensor], draw: Draw) -> Sequence[Tensor]:
    tangents = tuple(draw(f"tangent {i}", t) for i, t in enumerate(x))
    return torch.func.jvp(
        lambda *x: _floating(function(*x)), tuple(t.detach() for t in x), tangents
    )[1]


def _batches(x: list[Tensor]) -> list[Tensor]:
    flipped = [t.detach().reshape(-1).flip(0).reshape(t.shape) for t in x]
    return [torch.stack([t.detach(), f]) for t, f in zip(x, flipped, strict=True)]


def _loop(function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
    def over_batches(*batches: Tensor) -> Sequence[Tensor]:
        outputs = [function(*sample) for sample in zip(*batches, strict=True)]
        return [torch.stack(ys) for ys in zip(*outputs, strict=True)]

    return over_batches


def _gradient(function: Callable[..., Any], count: int) -> Callable[..., Sequence[Tensor]]:
    def gradient(*x_and_cotangents: Tensor) -> Sequence[Tensor]:
        x, cotangents = x_and_cotangents[:count], x_and_cotangents[count:]
        _, pullback = torch.func.vjp(lambda *x: _floating(function(*x)), *x)
        return pullback(list(cotangents))

    return gradient
