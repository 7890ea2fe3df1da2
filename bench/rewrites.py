"""Exact rewrites that were tried for TPU and not taken: each beside what is done, by the estimate.

    python bench/rewrites.py [--topology v5e]

Written in JAX, which says exactly what the TPU compiler gets. Each rewrite is first run on small
arrays: exit code 1 where one does not compute the same.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy
from jax import lax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from torch_convfix.commands._options import Formatter, add
from torch_convfix.tpu import _compiler

Array = Any
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """A convolution of stride 2 that halves its input; depthwise if ``weight[1]`` is 1."""

    x: Sizes
    weight: Sizes

    @property
    def groups(self) -> int:
        return self.x[1] // self.weight[1]

    @property
    def padding(self) -> int:
        return self.weight[2] // 2

    @property
    def grad_output(self) -> Sizes:
        return (self.x[0], self.weight[0], *(-(-n // 2) for n in self.x[2:]))

    def small(self) -> "Layer":
        """Of the same kind, for a check on arrays."""
        width = 4 if self.groups > 1 else self.x[1]
        return Layer((2, width, 8, 8), (width, *self.weight[1:]))


def forward(layer: Layer, x: Array, w: Array) -> Array:
    p = layer.padding
    return lax.conv_general_dilated(
        x, w, (2, 2), [(p, p)] * 2, feature_group_count=x.shape[1] // w.shape[1]
    )


def input_grad(layer: Layer, g: Array, w: Array) -> Array:
    return jax.vjp(lambda x: forward(layer, x, w), jnp.zeros(layer.x))[1](g)[0]


def weight_grad(layer: Layer, x: Array, g: Array) -> Array:
    return jax.vjp(lambda w: forward(layer, x, w), jnp.zeros(layer.weight))[1](g)[0]


def two(layer: Layer, x: Array, w: Array, y: Array, v: Array) -> Array:
    return forward(layer, x, w) + forward(layer, y, v)


def penalty(
    layer: Layer,
    x: Array,
    w: Array,
    of_weight: bool = True,
    two_forwards: Callable[..., Array] = two,
    weight_grad: Callable[..., Array] = weight_grad,
) -> tuple[Array, ...]:
    """A gradient-penalty step with its double backward written out: what autograd builds."""
    t = jnp.tanh(forward(layer, x, w))
    g = (1 - t * t) / t.size
    ggx = 2 * input_grad(layer, g, w)
    if not of_weight:  # the penalty of R1, of the gradient with respect to x alone
        dy = forward(layer, ggx, w) * (-2 * t * (1 - t * t)) / t.size
        return (weight_grad(layer, ggx, g) + weight_grad(layer, x, dy),)
    ggw = 2 * weight_grad(layer, x, g)
    ggo = two_forwards(layer, ggx, w, x, ggw)
    dy = ggo * (-2 * t * (1 - t * t)) / t.size
    return (
        input_grad(layer, g, ggw) + input_grad(layer, dy, w),
        weight_grad(layer, ggx, g) + weight_grad(layer, x, dy),
    )


def two_joined_by_channels(layer: Layer, x: Array, w: Array, y: Array, v: Array) -> Array:
    return forward(layer, jnp.concatenate([x, y], 1), jnp.concatenate([w, v], 1))


def two_as_depth(layer: Layer, x: Array, w: Array, y: Array, v: Array) -> Array:
    p = layer.padding
    return lax.conv_general_dilated(
        jnp.stack([x, y], 2),
        jnp.stack([w, v], 2),
        (1, 2, 2),
        [(0, 0), (p, p), (p, p)],
        feature_group_count=layer.groups,
    )[:, :, 0]


def two_weight_grads(layer: Layer, x: Array, g: Array, y: Array, h: Array) -> Array:
    return weight_grad(layer, x, g) + weight_grad(layer, y, h)


def two_joined_by_batch(layer: Layer, x: Array, g: Array, y: Array, h: Array) -> Array:
    joined = Layer((2 * layer.x[0], *layer.x[1:]), layer.weight)
    return weight_grad(joined, jnp.concatenate([x, y]), jnp.concatenate([g, h]))


def input_grad_by_phases(layer: Layer, g: Array, w: Array) -> Array:
    """Four convolutions of stride 1, one for every parity of a position (3 x 3 kernels)."""

    def rows(i: int) -> Array:
        return jnp.stack([part(i, j) for j in (0, 1)], -1).reshape(*g.shape[:3], layer.x[3])

    def part(i: int, j: int) -> Array:
        taps = [jnp.array([[1], [2, 0]][parity]) for parity in (i, j)]
        return lax.conv_general_dilated(
            g,
            w[:, :, taps[0]][..., taps[1]],
            (1, 1),
            [(0, i), (0, j)],
            feature_group_count=w.shape[0],
        )

    return jnp.stack([rows(0), rows(1)], 3).reshape(layer.x)


def weight_grad_by_gathered_taps(layer: Layer, x: Array, g: Array) -> Array:
    k, p, n = layer.weight[2], layer.padding, 2 * (g.shape[2] - 1) + 1
    padded = jnp.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
    taps = [padded[:, :, i : i + n : 2, j : j + n : 2] for i in range(k) for j in range(k)]
    return jnp.einsum("nohw,nckhw->ock", g, jnp.stack(taps, 2)).reshape(layer.weight)


def weight_grad_by_patches(layer: Layer, x: Array, g: Array) -> Array:
    k, p = layer.weight[2], layer.padding
    patches = lax.conv_general_dilated_patches(x, (k, k), (2, 2), [(p, p)] * 2)
    return jnp.einsum("nohw,nkhw->ok", g, patches).reshape(layer.weight)


@dataclass(frozen=True)
class Trial:
    """``tried(layer, *arrays)`` against ``done(layer, *arrays)``; operands names the arrays' sizes."""

    name: str
    layer: Layer
    operands: Sequence[str]
    done: Callable[..., Any]
    tried: Callable[..., Any]

    def sizes(self, layer: Layer) -> list[Sizes]:
        return [getattr(layer, operand) for operand in self.operands]


DEPTHWISE = Layer((32, 96, 56, 56), (96, 1, 3, 3))
DENSE = {c: Layer((32, c, 56, 56), (c, c, 3, 3)) for c in (32, 64, 128)}
STEMS = {
    "3 to 32, 3 x 3, 224 x 224": Layer((32, 3, 224, 224), (32, 3, 3, 3)),
    "3 to 64, 7 x 7, 224 x 224": Layer((32, 3, 224, 224), (64, 3, 7, 7)),
    "3 to 20, 3 x 3, 32 x 32": Layer((32, 3, 32, 32), (20, 3, 3, 3)),
}
R1 = partial(penalty, of_weight=False)


def trials() -> list[Trial]:
    step, one = ("x", "weight"), ("x", "grad_output")
    joined = partial(penalty, two_forwards=two_joined_by_channels)
    found = [
        Trial(
            f"F(ggx, w) + F(x, ggw) joined by channels, {c} channels", layer, step, penalty, joined
        )
        for c, layer in DENSE.items()
    ]
    found += [
        Trial("depthwise: two F as a depth of 2", DEPTHWISE, step * 2, two, two_as_depth),
        Trial(
            "depthwise: two W joined by batch",
            DEPTHWISE,
            one * 2,
            two_weight_grads,
            two_joined_by_batch,
        ),
        Trial(
            "depthwise: I by phases",
            DEPTHWISE,
            ("grad_output", "weight"),
            input_grad,
            input_grad_by_phases,
        ),
    ]
    for name, layer in STEMS.items():
        for way, of in (
            ("gathered taps", weight_grad_by_gathered_taps),
            ("patches", weight_grad_by_patches),
        ):
            in_step = partial(R1, weight_grad=of)
            found.append(Trial(f"{name}: W by {way}, alone", layer, one, weight_grad, of))
            found.append(Trial(f"{name}: W by {way}, in an R1 step", layer, step, R1, in_step))
    return found


def same(trial: Trial) -> bool:
    random = numpy.random.default_rng(0)
    layer = trial.layer.small()
    arrays = [jnp.asarray(random.normal(size=s)) for s in trial.sizes(layer)]
    pairs = zip(
        jax.tree.leaves(trial.done(layer, *arrays)),
        jax.tree.leaves(trial.tried(layer, *arrays)),
        strict=True,
    )
    return all(numpy.allclose(a, b, rtol=1e-9, atol=1e-9 * float(abs(a).max())) for a, b in pairs)


def cycles(fn: Callable[..., Any], trial: Trial, topology: str) -> int:
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in trial.sizes(trial.layer)]
    text = jax.jit(partial(fn, trial.layer)).lower(*shapes).as_text()
    return _compiler.compile_stablehlo(text, topology)[0].cycles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--topology")
    args = parser.parse_args()
    with jax.enable_x64(True):
        wrong = [trial.name for trial in trials() if not same(trial)]
    for name in wrong:
        print(f"not the same: {name}", file=sys.stderr)
    table = Table(box=None)
    for column in ("rewrite", "as done, cycles", "as tried", "ratio"):
        table.add_column(column, justify="left" if column == "rewrite" else "right")
    for trial in track(trials(), console=Console(stderr=True)):
        done, tried = (cycles(fn, trial, args.topology) for fn in (trial.done, trial.tried))
        table.add_row(trial.name, f"{done:,}", f"{tried:,}", f"{tried / done:.2f}")
    Console(width=120).print(table)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
