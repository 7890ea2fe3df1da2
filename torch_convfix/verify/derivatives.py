"""Every derivative of one call, on whatever device its tensors are."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_convfix.verify import transforms
from torch_convfix.verify.transforms import WORDS, Draw, order_of, real

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Failure:
    """What a stage raised. The exception would keep its frames, and so half-built tensors, alive."""

    line: str

    @classmethod
    def of(cls, e: Exception) -> "Failure":
        """The first line of the exception, as Python prints it."""
        return cls("".join(traceback.format_exception_only(e)).strip().splitlines()[0][:300])


VALUE: Final = "value"


AFTER_A_WRITE = " after a write"  # the stage on inputs that were just written in place
ALONE = " of one alone"  # the stage by each input while no other requires a gradient


def order_stage(order: int) -> str:
    """The stage's name: 0 is the value."""
    return f"order {order}" if order else VALUE


def all_stages(highest: int, *, composed: int = 2, batched: int = 2) -> list[str]:
    """The stages up to an order: up to ``composed`` the compositions of forward and reverse mode, and
    up to ``batched`` those with vmap, and by one input alone."""
    orders = [order_stage(order) for order in range(highest + 1)]
    written = [stage + AFTER_A_WRITE for stage in orders[:3]]
    alone = [stage + ALONE for stage in orders[1 : min(batched, 2) + 1]]
    words = [
        name
        for name, word in WORDS.items()
        if order_of(word) <= min(highest, batched if "V" in word else composed)
    ]
    return [*orders, *written, *alone, *words]


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

    @property
    def made(self) -> list[Tensor]:
        """The leaves that its last run made, where the function keeps them: they are differentiated too."""
        return getattr(self._fn, "made", [])

    def __call__(self, tensors: Sequence[Tensor], *, copy: bool = True) -> list[Tensor]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            # A call in place must not reach the caller's tensors.
            leaves[place] = tensor.clone() if copy or not tensor.requires_grad else tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        outputs = [
            t for t in pytree.tree_leaves(self._fn(*args, **kwargs)) if isinstance(t, Tensor)
        ]
        return list(map(real, outputs))


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
    reference: bool = False,
) -> dict[str, Results | Failure]:
    """The results of each stage, or what it raised; the orders after a raise are left out.

    Order 1 is the vector-Jacobian product with ``v``; order 2 that of order 1 with ``u``, with
    respect to the inputs and ``v``; and so on. ``draw(name, like)`` gives these cotangents. A
    ``reference`` takes neither vmap nor forward mode, and writes nothing before.
    """
    names = [f"input {i}" for i, t in enumerate(tensors) if t.requires_grad]
    x = [t for t in tensors if t.requires_grad]

    def function(*x: Tensor) -> tuple[Tensor, ...]:
        own = iter(x)
        return tuple(program([next(own) if t.requires_grad else t for t in tensors]))

    def after_a_write(*x: Tensor) -> tuple[Tensor, ...]:
        own = iter(x if reference else map(_written, x))
        return tuple(
            program([next(own) if t.requires_grad else t for t in tensors], copy=reference)
        )

    variables = dict(zip(names, x, strict=True))
    results: dict[str, Results | Failure] = {}
    _take_orders(results, program, function, variables, stages, draw, "")
    value = results[VALUE]
    if not x or isinstance(value, Failure):
        return results
    written = [stage for stage in stages if stage.endswith(AFTER_A_WRITE)]
    if written and not reference:
        _take_orders(results, program, after_a_write, variables, written, draw, AFTER_A_WRITE)
    elif written:
        plain = {stage: stage.removesuffix(AFTER_A_WRITE) for stage in written}
        results.update({s: results[p] for s, p in plain.items() if p in results})
    alone = [stage for stage in stages if stage.endswith(ALONE)]
    if alone and len(x) > 1:
        results.update(_by_each_alone(program, function, variables, alone, draw))
    outputs = {n: y for n, y in value.items() if y.is_floating_point()}
    for stage in stages:
        word = WORDS.get(stage)
        if word is None:
            continue
        of = function if word == "V" else lambda *x: _floating(function(*x))
        try:
            taken = transforms.evaluate(word, of, variables, outputs, draw, reference=reference)
            results[stage] = {f"output {i}": t.detach() for i, t in enumerate(taken)}
        except Exception as e:
            results[stage] = Failure.of(e)
    return results


def _written(x: Tensor) -> Tensor:
    """The same numbers, by writes in place: to a view, to its base, and to slices of it."""
    base = x / 8  # exact, as are the products
    view = base.view_as(base)
    base.mul_(2)
    if x.dim() and x.shape[-1]:
        view.narrow(-1, 0, 1).mul_(2)
        view.narrow(-1, 1, x.shape[-1] - 1).mul_(2)
    else:
        view.mul_(2)
    base.mul_(2)
    return view


def _by_each_alone(
    program: Program,
    function: Callable[..., tuple[Tensor, ...]],
    variables: Mapping[str, Tensor],
    stages: Sequence[str],
    draw: Draw,
) -> dict[str, Results | Failure]:
    """A device's kernel may be told which gradients are asked for, and leave out the wrong ones."""
    results: dict[str, Results | Failure] = {}
    for name, x in variables.items():
        others = {n: t.detach() for n, t in variables.items()}
        own: dict[str, Results | Failure] = {}
        _take_orders(
            own, program, lambda t, n=name, o=others: function(*(o | {n: t}).values()),
            {name: x}, stages, draw, ALONE,
        )  # fmt: skip
        for stage in stages:
            found, before = own.get(stage), results.get(stage, {})
            if found is None or isinstance(before, Failure):
                continue
            named = isinstance(found, dict) and {f"{n} ({name} alone)": t for n, t in found.items()}
            results[stage] = before | named if named else found
    return results


def _take_orders(
    results: dict[str, Results | Failure],
    program: Program,
    function: Callable[..., tuple[Tensor, ...]],
    variables: Mapping[str, Tensor],
    stages: Sequence[str],
    draw: Draw,
    suffix: str,
) -> None:
    own = [stage.removesuffix(suffix) for stage in stages if stage.endswith(suffix)]
    stage = VALUE
    try:
        for stage, result in _orders(program, function, dict(variables), own, draw):
            results[stage + suffix] = result
            stage = order_stage(1 if stage == VALUE else int(stage.split()[1]) + 1)
    except Exception as e:
        results[stage + suffix] = Failure.of(e)


def _orders(
    program: Program,
    function: Callable[..., tuple[Tensor, ...]],
    variables: dict[str, Tensor],
    stages: Sequence[str],
    draw: Draw,
) -> Iterator[tuple[str, Results]]:
    results = {f"output {i}": y for i, y in enumerate(function(*variables.values()))}
    yield VALUE, {name: y.detach() for name, y in results.items()}
    variables |= {f"leaf {i}": t for i, t in enumerate(program.made)}
    highest = max(
        (int(s.split()[1]) for s in stages if s.startswith("order ") and s[6:].isdigit()), default=0
    )
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
            name: real(torch.zeros_like(v) if g is None else g)
            for (name, v), g in zip(variables.items(), gradients, strict=True)
        }
        yield order_stage(order), {name: g.detach() for name, g in results.items()}
        for name, cotangent in cotangents.items():
            variables[f"cotangent {order} of {name}"] = cotangent


def _floating(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [y for y in outputs if y.is_floating_point()]
