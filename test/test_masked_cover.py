"""The boxes that a mask is cut into, and the ready masks."""

import pytest
import torch

from torch_convfix.masked.cover import _boxes, cover
from torch_convfix.nn import causal_mask, causal_mask_1d, checkerboard_mask


def test_cover_of_every_3x3_mask_has_the_fewest_boxes():
    runs = [range(a, b, s) for a in range(3) for b in range(a + 1, 4) for s in (1, 2)]
    boxes = {sum(1 << 3 * r + c for r in rows for c in cs) for rows in runs for cs in runs}
    fewest = [0] * 512
    for kept in range(1, 512):
        fewest[kept] = 1 + min(fewest[kept ^ box] for box in boxes if box & kept == box)
    assert [len(_boxes(kept, (3, 3))) for kept in range(512)] == fewest


@pytest.mark.parametrize(
    ("mask", "convolutions"),
    [(causal_mask(k, kind), 2) for k in (3, 5, 7, 11) for kind in "AB"]
    + [(checkerboard_mask(k), 2) for k in (3, 5, 7)]
    + [(causal_mask_1d(9), 1), (causal_mask((3, 3, 3)), 3)]
    + [(causal_mask(3, "A", (6, 6)), 4), (causal_mask(3, "B", (6, 6)), 5)],
)
def test_cuts_of_the_ready_masks(mask, convolutions):
    shape = torch.broadcast_shapes(mask.shape, (6, 6, *mask.shape[2:]))
    plan = cover(mask, torch.Size(shape), 1)
    assert plan.exact and plan.convolutions == convolutions


def test_ready_masks():
    assert causal_mask(3, "A")[0, 0].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert causal_mask((2, 3), "B")[0, 0].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert causal_mask_1d(5, "A")[0, 0].tolist() == [1, 1, 0, 0, 0]
    assert checkerboard_mask(3)[0, 0].tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    centres = {kind: causal_mask(3, kind, (3, 6))[:, ::2, 1, 1].tolist() for kind in "AB"}
    assert centres["A"] == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert centres["B"] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="kind: got 'C'"):
        causal_mask(3, "C")
    with pytest.raises(ValueError, match=r"channels: got \(4, 3\)"):
        causal_mask(3, channels=(4, 3))
