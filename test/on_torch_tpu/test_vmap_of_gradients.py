"""vmap over grad_output alone of activations' gradients, which TorchTPU's kernels refuse."""

import pytest
import torch
from placeholders import on_tpu
from support import worst_error
from torch.nn import functional as F

ACTIVATIONS = [F.silu, torch.sigmoid, F.softplus, F.logsigmoid, F.relu, torch.tanh]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
def test_vmap_over_grad_output(activation):
    def step(x, v):
        return [torch.func.vmap(torch.func.vjp(activation, x)[1])(v)[0]]

    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(s, generator=generator) for s in ((3,), (2, 3)))
    want = step(x.double(), v.double())
    assert worst_error(on_tpu(step, x, v), want) < 1e-5


def test_hessian_of_prelu():
    def step(x, w):
        return [torch.func.hessian(lambda w: F.prelu(x, w).square().sum())(w)]

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator) for s in ((4, 3), (3,)))
    want = step(x.double(), w.double())
    assert worst_error(on_tpu(step, x, w), want) < 1e-5
