"""The steps that the examples train by, on TorchTPU, traced: against float64, and where stock is wrong."""

import copy

import pytest
import sharpness
import torch
import weight_gradient_penalty
import wgan_gp
from placeholders import on_tpu

import torch_convfix


def images(number: int, *shape: int) -> torch.Tensor:
    return torch.rand(number, *shape, generator=torch.Generator().manual_seed(0))


LABELS = torch.arange(8) % 10


def wgan_critic():
    torch.manual_seed(0)
    return wgan_gp.critic_step(wgan_gp.make_critic(), images(8, 1, 8, 8))


def weight_penalty():
    torch.manual_seed(0)
    return weight_gradient_penalty.penalty_step(images(8, 1, 8, 8), LABELS)


def hessian_product():
    torch.manual_seed(0)
    net = sharpness.make_net()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    v = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))

    def step(*given):
        return [sharpness.hessian_product(net, *given)]

    return step, [flat, v, images(8, 1, 8, 8), LABELS]


def run(step, inputs, how, dtype):
    own = [t.detach().to(dtype) if t.is_floating_point() else t for t in copy.deepcopy(inputs)]
    return how(step, *(t.requires_grad_(t.is_floating_point()) for t in own))


# resnet18's penalty, minutes of compiling, is a row of the zoo.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "stock_is_right", "tolerance"),
    [
        (wgan_critic, True, 1e-4),
        (weight_penalty, False, 1e-4),
        (hessian_product, False, 1e-4),
    ],
)
def test_step(make, stock_is_right: bool, tolerance: float):
    step, inputs = make()
    found = {}
    for name, kernels in (("stock", torch_convfix.disabled), ("ours", torch_convfix.enabled)):
        with kernels("tpu"):
            found[name] = run(step, inputs, on_tpu, torch.float32)
    want = run(step, inputs, lambda step, *given: step(*given), torch.float64)
    errors = {name: as_one(got, want) for name, got in found.items()}
    assert errors["ours"] < tolerance, errors
    assert (errors["stock"] < tolerance) == stock_is_right, errors


def as_one(got, want) -> float:
    """The error of all as one vector: some entry of a large net's gradient is of rounding size."""
    g, w = (torch.cat([t.detach().double().flatten() for t in part]) for part in (got, want))
    return ((g - w).norm() / w.norm()).item()
