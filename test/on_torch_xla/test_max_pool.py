"""max_pool2d and max_pool3d on XLA, all arguments, to the third derivative."""

import itertools

import pytest
import torch
from device import on_xla
from support import derivatives, worst_error
from torch.nn import functional as F

ARGUMENTS = {  # name: kernel, stride, padding, dilation, ceil_mode
    "plain": (2, None, 0, 1, False),
    "overlapping": (3, 2, 1, 1, False),
    "stride 1": (2, 1, 0, 1, False),
    "ceil": (3, 2, 0, 1, True),
    "ceil, padded": (2, 2, 1, 1, True),
    "dilated": (2, 2, 0, 2, False),
    "dilated, padded, ceil": (2, 3, 1, 2, True),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("dim", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ties", [False, True])
def test_orders(dim, name, ties):
    pool = {2: F.max_pool2d, 3: F.max_pool3d}[dim]
    size = (2, 3, 7, 6) if dim == 2 else (1, 2, 5, 6, 5)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.rand(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(x, scale):
        def layer(x, scale):
            x = F.relu(x - 0.3) if ties else x  # many zeros: the first one is the maximum
            return pool(torch.sin(x) * scale, *ARGUMENTS[name])

        return derivatives(layer, [x, scale], 3)

    assert worst_error(on_xla(run, x, scale), run(x, scale)) < 1e-10


def test_indices():
    x = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0))

    def run(x):
        x = F.relu(x)
        return list(
            itertools.chain.from_iterable(
                F.max_pool2d(x, *arguments, return_indices=True) for arguments in ARGUMENTS.values()
            )
        )

    got, want = on_xla(run, x), run(x)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
