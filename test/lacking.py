"""The operators whose second derivative PyTorch lacks: as functions of what is differentiable."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Operator:
    """A call, and an independent formula for it from differentiable operators of PyTorch."""

    call: Function
    formula: Function
    inputs: tuple[Tensor, ...]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def norm(d: Tensor, p: float) -> Tensor:
    """Of vectors without a zero or a tie, where p is neither 1 nor even."""
    if p == float("inf"):
        return d.abs().amax(-1)
    return (d.pow(p) if p % 2 == 0 else d.abs().pow(p)).sum(-1).pow(1 / p)


def _cdist(x: Tensor, y: Tensor, p: float) -> Tensor:
    return norm(x.unsqueeze(-2) - y.unsqueeze(-3), p)


def _distances() -> Iterator[tuple[str, Operator]]:
    for p in (0.7, 1.0, 1.5, 2.0, 3.0, 4.0, float("inf")):

        def cdist(x: Tensor, y: Tensor, p: float = p) -> Tensor:
            return torch.cdist(x, y, p)

        def pdist(x: Tensor, p: float = p) -> Tensor:
            return F.pdist(x, p)

        def pdist_formula(x: Tensor, p: float = p) -> Tensor:
            i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
            return norm(x[i] - x[j], p)

        points = normal(2, 3, 4), normal(2, 5, 4, seed=1)
        yield f"cdist {p}", Operator(cdist, partial(_cdist, p=p), points)
        yield f"pdist {p}", Operator(pdist, pdist_formula, (normal(4, 3),))

    broadcast = normal(2, 3, 4), normal(5, 4, seed=1)
    yield "cdist of broadcast batches", Operator(torch.cdist, partial(_cdist, p=2), broadcast)

    def many(x: Tensor, y: Tensor) -> Tensor:  # through a matrix product
        return torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist")

    yield (
        "cdist by a product",
        Operator(many, lambda x, y: norm(x[:, None] - y, 2), (normal(3, 4), normal(5, 4, seed=1))),
    )


def _margin_losses() -> Iterator[tuple[str, Operator]]:
    labels = [1, 0, 3, 3]
    weight = torch.tensor([0.5, 2.0, 1.0, 1.5], dtype=torch.float64)
    many = [[2, 0, -1, 1], [-1, 0, 1, 2], [3, 1, 2, 0], [1, 1, -1, 0]]
    reductions: dict[str, Function] = {"none": lambda t: t, "mean": torch.mean, "sum": torch.sum}
    for reduction, reduce in reductions.items():
        for p, w in ((1, None), (2, None), (2, weight)):

            def multi(x, p=p, w=w, reduction=reduction):
                w = None if w is None else w.to(x)
                y = torch.tensor(labels, device=x.device)
                return F.multi_margin_loss(x, y, p, 0.7, w, reduction=reduction)

            def multi_formula(x, p=p, w=w, reduce=reduce):
                losses = [
                    sum(F.relu(0.7 - row[y] + row[j]) ** p for j in range(4) if j != y)
                    * (1 if w is None else w[y])
                    / 4
                    for row, y in zip(x, labels, strict=True)
                ]
                return reduce(torch.stack(losses))

            weighted = "" if w is None else ", weighted"
            name = f"multi_margin_loss p={p}{weighted}, {reduction}"
            yield name, Operator(multi, multi_formula, (normal(4, 4),))

        def multilabel(x, reduction=reduction):
            return F.multilabel_margin_loss(
                x, torch.tensor(many, device=x.device), reduction=reduction
            )

        def multilabel_formula(x, reduce=reduce):
            losses = []
            for row, listed in zip(x, many, strict=True):
                own = listed[: listed.index(-1)] if -1 in listed else listed
                others = [j for j in range(4) if j not in own]
                pairs = [F.relu(1 - row[y] + row[j]) for y in own for j in others]
                losses.append(sum(pairs, row.sum() * 0) / 4)
            return reduce(torch.stack(losses))

        yield (
            f"multilabel_margin_loss {reduction}",
            Operator(multilabel, multilabel_formula, (normal(4, 4),)),
        )


# Each row twice: core scales by the frequency of another row. The last bag may be padding alone.
BAGS = [[1, 0, 1], [], [3, 3], [0], [2, 2]]


def _embedding_bags() -> Iterator[tuple[str, Operator]]:
    indices = torch.tensor([i for bag in BAGS for i in bag])
    offsets = torch.tensor([0, 3, 3, 5, 6])
    for mode in ("sum", "mean", "max"):
        for padding in (None, 2):
            for by_frequency in (False, True) if mode != "max" else (False,):

                def call(w, mode=mode, padding=padding, by_frequency=by_frequency):
                    at = [t.to(w.device) for t in (indices, offsets)]
                    options = {"mode": mode, "padding_idx": padding}
                    return F.embedding_bag(
                        at[0], w, at[1], scale_grad_by_freq=by_frequency, **options
                    )

                def formula(w, mode=mode, padding=padding, by_frequency=by_frequency):
                    if by_frequency:  # the gradient alone is scaled
                        counts = torch.bincount(indices, minlength=len(w)).clamp_min(1)
                        scaled = w / counts.to(w)[:, None]
                        w = scaled + (w - scaled).detach()
                    return torch.stack([_reduced(w, bag, mode, padding) for bag in BAGS])

                name = f"embedding_bag {mode}, padding {padding}" + ", by frequency" * by_frequency
                yield name, Operator(call, formula, (normal(4, 3),))

    def weighted(w, s):
        at = [t.to(w.device) for t in (indices, offsets)]
        return F.embedding_bag(at[0], w, at[1], mode="sum", per_sample_weights=s)

    def weighted_formula(w, s):
        starts = [0, 3, 3, 5, 6, 8]
        rows = w[indices] * s[:, None]
        return torch.stack([rows[a:b].sum(0) for a, b in itertools.pairwise(starts)])

    yield (
        "embedding_bag weighted",
        Operator(weighted, weighted_formula, (normal(4, 3), normal(8, seed=1))),
    )


def _reduced(w: Tensor, bag: list[int], mode: str, padding: int | None) -> Tensor:
    rows = [w[i] for i in bag if i != padding]
    if not rows:
        return w.sum(0) * 0
    stacked = torch.stack(rows)
    return stacked.amax(0) if mode == "max" else getattr(stacked, mode)(0)


def _segment_reductions() -> Iterator[tuple[str, Operator]]:
    lengths = [2, 0, 3, 1]
    bounds = [0, 2, 2, 5, 6]
    for reduce in ("sum", "mean", "max", "min", "prod"):
        for given in ("lengths", "offsets"):

            def call(x, reduce=reduce, given=given):
                values = torch.tensor(lengths if given == "lengths" else bounds, device=x.device)
                return torch.segment_reduce(x, reduce, **{given: values}, axis=0, initial=2)

            def formula(x, reduce=reduce):
                parts = [x[a:b] for a, b in itertools.pairwise(bounds)]
                return torch.stack([_of_segment(part, reduce) for part in parts])

            yield f"segment_reduce {reduce} {given}", Operator(call, formula, (normal(6, 2),))

    def rows(x):  # of a batch, each with lengths of its own; some positions are in none
        values = torch.tensor([[2, 1], [0, 3]], device=x.device)
        return torch.segment_reduce(x, "prod", lengths=values, axis=1, unsafe=True)

    def rows_formula(x):
        parts = [x[0, :2], x[0, 2:3], x[1, :0], x[1, :3]]
        return torch.stack([part.prod() for part in parts]).reshape(2, 2)

    yield "segment_reduce prod of rows", Operator(rows, rows_formula, (normal(2, 4),))


def _of_segment(part: Tensor, reduce: str) -> Tensor:
    start = torch.full_like(part[:1], 2) if len(part) else part.new_full((1, 2), 2)
    full = torch.cat([start, part])
    if reduce == "mean":
        return full.sum(0) / max(1, len(part))
    return {"sum": full.sum, "prod": full.prod, "max": full.amax, "min": full.amin}[reduce](0)


HARDSIGMOID = Operator(
    F.hardsigmoid, lambda x: F.hardtanh(x / 6 + 0.5, 0.0, 1.0), (2 * normal(3, 5),)
)
OPERATORS: dict[str, Operator] = {
    "hardsigmoid": HARDSIGMOID,
    "hardswish": Operator(
        F.hardswish, lambda x: x * F.hardtanh(x / 6 + 0.5, 0.0, 1.0), HARDSIGMOID.inputs
    ),
    **dict(_distances()),
    **dict(_margin_losses()),
    **dict(_embedding_bags()),
    **dict(_segment_reductions()),
}
