"""The leaky reference computes a convolution, and its derivatives."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_convfix.reference import winograd_conv2d


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_the_convolution_and_its_derivatives(data):
    tile = data.draw(st.sampled_from((2, 4, 6)))
    kernel = [data.draw(st.integers(1, 9 - tile)) for _ in range(2)]
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(2))
    size = [k + data.draw(st.integers(0, 9)) for k in kernel]
    torch.manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, *kernel, dtype=torch.float64, requires_grad=True)

    def derivatives(y):
        first = torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))]

    ours = derivatives(winograd_conv2d(x, w, tile, padding))
    for a, b in zip(ours, derivatives(F.conv2d(x, w, padding=padding)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_transforms_are_those_of_the_paper():
    # F(2, 3) of Lavin and Gray, section 4.1: 4 products where the direct way takes 6.
    from torch_convfix.reference import _transforms

    a, g, b = _transforms(2, 3)
    assert a.T.tolist() == [[1, 1, 1, 0], [0, 1, -1, 1]]
    assert (2 * b.T[1:3]).tolist() == [[0, 1, 1, 0], [0, -1, 1, 0]]
    assert g[1:3].tolist() == [[1, 1, 1], [1, -1, 1]]
    for tile in (4, 6):
        assert _transforms(tile, 3)[2].shape == (tile + 2, tile + 2)


@pytest.mark.parametrize(
    ("x", "w", "tile", "message"),
    [
        ((1, 2, 5, 5), (3, 2, 3, 3), 3, "tile: got 3; use 2, 4 or 6"),
        ((1, 2, 9, 9), (3, 2, 4, 3), 6, "w: got shape .* at most 3 each way for tile=6"),
        ((1, 1, 5, 5), (3, 2, 3, 3), 2, r"x: got shape \(1, 1, 5, 5\); it must be \(batch, 2"),
        ((1, 2, 2, 5), (3, 2, 3, 3), 2, "x: got shape .* smaller than the kernel"),
    ],
)
def test_errors_name_the_argument(x, w, tile, message):
    with pytest.raises(ValueError, match=message):
        winograd_conv2d(torch.ones(x), torch.ones(w), tile)
