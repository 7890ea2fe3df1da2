"""Cut a mask into dense sub-kernels.

A mask keeps some taps of a kernel for some channel pairs. `cover` writes the kept weights as a
disjoint union of products groups x output channels x input channels x boxes of taps. Each product
is an ordinary convolution; no masked weight is in any of them, so none is read. All such covers
need the same multiplications (one per kept weight and output), so the one with the fewest
convolutions is taken.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_CONVOLUTIONS = 32  # a channel mask that needs more has no structure worth cutting along
SEARCH_NODES = 5000  # enough to prove the optimum for every mask of this package up to 11x11


Box = tuple[range, ...]  # the taps of one dense sub-kernel, per spatial dimension


@dataclass(frozen=True)
class Block:
    """The same boxes of taps for every channel pair of `groups` x `outs` x `ins`.

    `outs` and `ins` count the channels within a group.
    """

    groups: tuple[int, ...]
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def taps(self) -> int:
        return sum(math.prod(map(len, box)) for box in self.boxes)


@dataclass(frozen=True)
class Cover:
    """How a masked kernel is computed; `channels` is (groups, outputs, inputs of a group).

    With `exact` False the blocks also hold masked weights, which must be set to zero first.
    """

    channels: tuple[int, int, int]
    blocks: tuple[Block, ...]
    exact: bool

    @property
    def convolutions(self) -> int:
        return sum(len(block.boxes) for block in self.blocks)


def check_mask(mask: torch.Tensor, weight_shape: torch.Size) -> torch.Tensor:
    """`mask` as a CPU bool tensor of the shape of the weight, or a ValueError."""
    if mask.is_meta:
        raise ValueError("mask: got a meta tensor; its values choose the cut, so give a real one")
    mask = mask.detach().cpu()
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError("mask: got values other than 0 and 1; only 0 (masked) and 1 (kept) fit")
    try:
        return mask.bool().broadcast_to(weight_shape)
    except RuntimeError:
        raise ValueError(
            f"mask: got shape {tuple(mask.shape)}; it must broadcast to the weight's shape "
            f"{tuple(weight_shape)}"
        ) from None


def cover(
    mask: torch.Tensor, weight_shape: torch.Size, groups: int, transposed: bool = False
) -> Cover:
    """The cover of `mask`, which must broadcast to `weight_shape` (out, in / groups, *kernel).

    A transposed convolution's weight is (in, out / groups, *kernel). Warns where it falls back.
    """
    mask = check_mask(mask, weight_shape).unflatten(0, (groups, -1))
    mask = mask.transpose(1, 2) if transposed else mask
    # Channels with equal masks are one channel to the search.
    ids = []
    for axis in range(3):
        classes = _classes(mask.transpose(0, axis))
        mask = mask.index_select(axis, torch.tensor([m[0] for _, m in classes], dtype=torch.long))
        ids.append([members for _, members in classes])
    plans = [p for p in map(_limited, (_by_taps(mask), _by_pairs(mask))) if p is not None]
    exact = bool(plans)
    if exact:
        blocks = min(plans, key=lambda p: sum(len(boxes) for *_, boxes in p))
    else:
        kept = mask.flatten(0, 2).any(0)
        all_groups, all_outs, all_ins = (tuple(range(n)) for n in mask.shape[:3])
        blocks = [(all_groups, all_outs, all_ins, _boxes_of(kept))]
        warnings.warn(
            "mask: it differs from channel pair to channel pair without structure, so the kernel "
            "is multiplied by it and masked inputs may leak (exact is False)",
            stacklevel=3,
        )

    def lift(axis: int, members: _Members) -> _Members:
        return tuple(sorted(i for k in members for i in ids[axis][k]))

    weight_channels = (weight_shape[0] // groups, weight_shape[1])
    channels = (groups, *(weight_channels[::-1] if transposed else weight_channels))
    lifted = tuple(Block(lift(0, g), lift(1, o), lift(2, i), boxes) for g, o, i, boxes in blocks)
    return Cover(channels, lifted, exact)


_Members = tuple[int, ...]
_Block = tuple[_Members, _Members, _Members, tuple[Box, ...]]


def _classes(table: torch.Tensor) -> list[tuple[torch.Tensor, _Members]]:
    """Every distinct row with the indices that have it; rows that keep nothing are left out."""
    found: dict[bytes, list[int]] = {}
    for i, row in enumerate(table.flatten(1).byte().numpy()):
        found.setdefault(row.tobytes(), []).append(i)
    return [(table[m[0]], tuple(m)) for m in found.values() if table[m[0]].any()]


def _limited(blocks: Iterator[_Block]) -> list[_Block] | None:
    """All blocks, or None as soon as channel cuts cost more than MAX_CONVOLUTIONS."""
    taken, total = [], 0
    for block in blocks:
        taken.append(block)
        total += len(block[3])
        if len(taken) > 1 and total > MAX_CONVOLUTIONS:
            return None
    return taken


def _by_taps(mask: torch.Tensor) -> Iterator[_Block]:
    """Taps with the same channel pairs together: few blocks for colour groups."""
    shape = mask.shape
    for pairs, taps in _classes(mask.flatten(3).movedim(3, 0)):
        kept = torch.zeros(math.prod(shape[3:]), dtype=torch.bool)
        kept[list(taps)] = True
        boxes = _boxes_of(kept.view(shape[3:]))
        yield from ((*product, boxes) for product in _products(pairs))


def _by_pairs(mask: torch.Tensor) -> Iterator[_Block]:
    """Channel pairs with the same taps together: few blocks for per-channel masks."""
    for taps, pairs in _classes(mask.flatten(0, 2)):
        kept = torch.zeros(math.prod(mask.shape[:3]), dtype=torch.bool)
        kept[list(pairs)] = True
        boxes = _boxes_of(taps)
        yield from ((*product, boxes) for product in _products(kept.view(mask.shape[:3])))


def _products(pairs: torch.Tensor) -> Iterator[tuple[_Members, _Members, _Members]]:
    """Cut a relation (groups, outs, ins) into products, by rows or by columns within a group."""
    for relation, groups in _classes(pairs):
        rows, columns = _classes(relation), _classes(relation.T)
        if len(rows) <= len(columns):
            yield from ((groups, outs, _kept(row)) for row, outs in rows)
        else:
            yield from ((groups, _kept(column), ins) for column, ins in columns)


def _kept(row: torch.Tensor) -> _Members:
    return tuple(row.nonzero().flatten().tolist())


def _boxes_of(kept: torch.Tensor) -> tuple[Box, ...]:
    bits = sum(1 << i for i in _kept(kept.flatten()))
    return _boxes(bits, tuple(kept.shape))


@functools.lru_cache(maxsize=1024)
def _boxes(kept: int, kernel_size: tuple[int, ...]) -> tuple[Box, ...]:
    """The fewest disjoint boxes whose union is `kept` (one bit a tap, row-major).

    Branch and bound over exact covers, after Knuth's Algorithm X: the first uncovered tap is the
    first corner of its box, so only boxes from there are tried, largest first. Stopped after
    SEARCH_NODES nodes with the best cover seen.
    """
    best: list[tuple[int, ...] | None] = [None]
    best_cost = math.inf
    seen: dict[int, int] = {}
    nodes = 0
    shapes: dict[int, Box] = {}

    def search(rest: int, cost: int, chosen: tuple[int, ...]) -> None:
        nonlocal best_cost, nodes
        if not rest:
            best[0], best_cost = chosen, cost
            return
        nodes += 1
        seen[rest] = cost
        for bits, box in _from_first(rest, kernel_size):
            left = rest & ~bits
            total = cost + 1000 + _extra(box, kernel_size)
            if total + (1000 if left else 0) >= best_cost or seen.get(left, math.inf) <= total:
                continue
            if nodes >= SEARCH_NODES and best[0] is not None:
                return
            shapes[bits] = box
            search(left, total, (*chosen, bits))

    search(kept, 0, ())
    return tuple(shapes[bits] for bits in best[0] or ())


def _extra(box: Box, kernel_size: tuple[int, ...]) -> int:
    """The smaller costs of a box: gaps, and sides that need a copy to pad them unevenly."""
    uneven = sum(r[0] + r[-1] != k - 1 for r, k in zip(box, kernel_size, strict=True))
    return 4 * any(r.step > 1 for r in box) + uneven


def _from_first(rest: int, kernel_size: tuple[int, ...]) -> list[tuple[int, Box]]:
    """All boxes within `rest` whose first corner is its first tap, largest first."""
    first = (rest & -rest).bit_length() - 1
    found: list[tuple[int, Box]] = [(1 << first, ())]
    stride = 1
    for length in reversed(kernel_size):
        start = first // stride % length
        grown = []
        for bits, box in found:
            grown.append((bits, (range(start, start + 1), *box)))
            for step in range(1, length - start):
                run = bits
                for tap in range(start + step, length, step):
                    run |= bits << stride * (tap - start)
                    if run & ~rest:
                        break
                    grown.append((run, (range(start, tap + 1, step), *box)))
        found, stride = grown, stride * length
    found.sort(key=lambda f: -f[0].bit_count())
    return found
