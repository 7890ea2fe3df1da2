"""Lazy modules moved to XLA before their first call."""

import pytest
import torch
from device import DEVICE, on_xla
from torch import nn

import torch_convfix  # noqa: F401

MODULES = {
    "LazyConv1d": (lambda: nn.LazyConv1d(4, 3), (2, 3, 6)),
    "LazyConv2d": (lambda: nn.LazyConv2d(4, 3), (2, 3, 6, 6)),
    "LazyConv3d": (lambda: nn.LazyConv3d(4, 3), (2, 3, 4, 4, 4)),
    "LazyConvTranspose1d": (lambda: nn.LazyConvTranspose1d(4, 3), (2, 3, 6)),
    "LazyConvTranspose2d": (lambda: nn.LazyConvTranspose2d(4, 3), (2, 3, 6, 6)),
    "LazyConvTranspose3d": (lambda: nn.LazyConvTranspose3d(4, 3), (2, 3, 4, 4, 4)),
    "LazyLinear": (lambda: nn.LazyLinear(4), (2, 3)),
    "LazyBatchNorm1d": (lambda: nn.LazyBatchNorm1d(), (4, 3)),
    "LazyBatchNorm2d": (lambda: nn.LazyBatchNorm2d(), (2, 3, 4, 4)),
    "LazyBatchNorm3d": (lambda: nn.LazyBatchNorm3d(), (2, 3, 2, 2, 2)),
    "LazyInstanceNorm2d": (lambda: nn.LazyInstanceNorm2d(affine=True), (2, 3, 4, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_it_is_made_at_its_first_call(name: str):
    make, size = MODULES[name]
    layer = nn.Sequential(make().to(torch.float64)).to(DEVICE)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    names = []

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        y = layer(x)
        names.extend(layer.state_dict())
        return [y, *layer.state_dict().values()]

    got, *state = on_xla(run, x)
    assert all(p.device == DEVICE for p in layer.parameters())
    like = nn.Sequential(make()).double()
    like(x)  # gives its parameters their sizes
    like.load_state_dict(dict(zip(names, state, strict=True)))
    assert torch.allclose(got, like(x), rtol=1e-8, atol=1e-10)
