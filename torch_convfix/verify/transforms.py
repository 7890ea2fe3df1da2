"""What can be made of a function by forward mode, reverse mode and vmap, in any order.

A word has a letter for each transform, the innermost first: R takes the vector-Jacobian product, F
the Jacobian-vector product, each with respect to all that the function so far depends on; V goes
over a batch of all of it, D over directions of the last transform alone.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Function = Callable[..., Sequence[Tensor]]
Draw = Callable[[str, Tensor], Tensor]

_NAMES = {"R": "reverse", "F": "forward", "V": "vmap"}


def _name(word: str) -> str:
    named = {"F": "forward mode", "V": "vmap", "RV": "vmap of gradient", "RFD": "Hessian"}
    return named.get(word) or " over ".join(_NAMES[letter] for letter in reversed(word))


def _words(order: int) -> list[str]:
    """The compositions of an order that reverse mode alone does not give, and each with vmap anywhere."""
    plain = ["".join(letters) for letters in itertools.product("RF", repeat=order)]
    plain = [word for word in plain if len(word) < 3 or "F" in word]  # RRR: order 3
    batched = [word[:i] + "V" + word[i:] for word in plain for i in reversed(range(order + 1))]
    return [*(word for word in plain if word != "R"), *batched]


WORDS = {_name(w): w for w in ("F", "V", "RF", "FR", "FF", "RFD", "RV")}
WORDS |= {_name(w): w for order in (1, 2, 3) for w in _words(order)}


def order_of(word: str) -> int:
    """How often it differentiates."""
    return sum(letter in "RF" for letter in word)


@dataclass
class _Level:
    """A function so far, its variables by name, what its results are like, how many are the last's."""

    function: Function
    variables: dict[str, Tensor]
    outputs: dict[str, Tensor]
    new: int = 0


def evaluate(
    word: str,
    function: Function,
    variables: dict[str, Tensor],
    outputs: dict[str, Tensor],
    draw: Draw,
    *,
    reference: bool = False,
) -> Sequence[Tensor]:
    """The results of ``word`` of a function; ``outputs`` are its own.

    The reference takes a loop for vmap, and for forward mode reverse mode twice, since PyTorch's own rules
    may be wrong; forward mode only where the reverse one is not differentiable, or not finite.
    """

    def taken(by: _Means) -> Sequence[Tensor]:
        at = _Level(function, {n: t.detach() for n, t in variables.items()}, outputs)
        for depth, letter in enumerate(word):
            at = _STEPS[letter](at, draw, f"{word[:depth]}>", by)
        return at.function(*at.variables.values())

    if not reference:
        return taken(_TRANSFORMS)
    # Outside of its domain (a logarithm of what is negative) a function has no derivative to agree on.
    if all(t.isfinite().all() for t in outputs.values()):
        with contextlib.suppress(RuntimeError):
            results = taken(_REVERSE_ONLY)
            if all(t.isfinite().all() for t in results):
                return results
    return taken(_LOOP)


def real(t: Tensor) -> Tensor:
    """Real numbers with the same derivatives: of a complex tensor both parts, of a sparse one all."""
    t = t if t.layout is torch.strided else t.to_dense()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


@dataclass
class _Means:
    """What stands for vmap and for the Jacobian-vector product."""

    vmap: Callable[..., Function]
    jvp: Callable[[Function, tuple[Tensor, ...], tuple[Tensor, ...]], Sequence[Tensor]]


def _reverse(at: _Level, draw: Draw, depth: str, by: _Means) -> _Level:
    count = len(at.variables)
    cotangents = {f"{depth}cotangent of {n}": y for n, y in at.outputs.items()}

    def gradient(*given: Tensor) -> Sequence[Tensor]:
        _, pullback = torch.func.vjp(lambda *x: tuple(at.function(*x)), *given[:count])
        return [real(g) for g in pullback(tuple(given[count:]))]

    new = {n: draw(n, y) for n, y in cotangents.items()}
    outputs = {n: real(t) for n, t in at.variables.items()}
    return _Level(gradient, at.variables | new, outputs, len(new))


def _forward(at: _Level, draw: Draw, depth: str, by: _Means) -> _Level:
    count = len(at.variables)

    def tangent(*given: Tensor) -> Sequence[Tensor]:
        return by.jvp(lambda *x: tuple(at.function(*x)), given[:count], given[count:])

    new = {f"{depth}tangent of {n}": t for n, t in at.variables.items()}
    new = {n: draw(n, t) for n, t in new.items()}
    return _Level(tangent, at.variables | new, at.outputs, len(new))


def _batch(at: _Level, draw: Draw, depth: str, by: _Means) -> _Level:
    variables = {f"{n}, batch": _two(t) for n, t in at.variables.items()}
    outputs = {n: torch.stack([y, y]) for n, y in at.outputs.items()}
    return _Level(by.vmap(at.function), variables, outputs)


def _directions(at: _Level, draw: Draw, depth: str, by: _Means) -> _Level:
    count = len(at.variables) - at.new
    batched = [None] * count + [0] * at.new
    values = [*at.variables.items()]
    variables = dict(values[:count]) | {f"{n}, batch": _two(t) for n, t in values[count:]}
    return _Level(by.vmap(at.function, in_dims=tuple(batched)), variables, at.outputs)


def _two(t: Tensor) -> Tensor:
    return torch.stack([t, t.reshape(-1).flip(0).reshape(t.shape)])


_STEPS: dict[str, Callable[..., _Level]] = {
    "R": _reverse,
    "F": _forward,
    "V": _batch,
    "D": _directions,
}


def _loop(function: Function, in_dims: Sequence[int | None] | None = None) -> Function:
    def over_batch(*given: Tensor) -> Sequence[Tensor]:
        dims = in_dims or [0] * len(given)
        size = next(t.shape[0] for t, d in zip(given, dims, strict=True) if d == 0)
        samples = [
            [t if d is None else t[i] for t, d in zip(given, dims, strict=True)]
            for i in range(size)
        ]
        outputs = [function(*sample) for sample in samples]
        return [torch.stack(ys) for ys in zip(*outputs, strict=True)]

    return over_batch


def _jvp(f: Function, x: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Sequence[Tensor]:
    return torch.func.jvp(f, x, tangents)[1]


def _jvp_by_reverse_mode(
    f: Function, x: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> Sequence[Tensor]:
    """The gradient of the vector-Jacobian product, which is linear in its cotangents, by these."""
    outputs, pullback = torch.func.vjp(f, *x)
    _, push = torch.func.vjp(lambda *u: pullback(u), *map(torch.zeros_like, outputs))
    return push(tangents)


_TRANSFORMS = _Means(torch.func.vmap, _jvp)
_REVERSE_ONLY = _Means(_loop, _jvp_by_reverse_mode)
_LOOP = _Means(_loop, _jvp)
