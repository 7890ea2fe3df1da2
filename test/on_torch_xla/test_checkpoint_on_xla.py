"""torch.utils.checkpoint on XLA: derivatives of derivatives, and the generator put back."""

from collections.abc import Sequence
from functools import partial

import checkpointed
import pytest
import torch
from device import DEVICE, on_xla
from support import worst_error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_convfix
from torch_convfix import tpu


def step(x: Tensor, w: Tensor, *, preserve: bool, checkpointed: bool = True) -> Sequence[Tensor]:
    def net(x: Tensor, w: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(F.conv2d(x.sin(), w), inplace=True), 2)

    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    extra = {"use_reentrant": False, "preserve_rng_state": preserve}
    y = checkpoint(net, x, w, **extra) if checkpointed else net(x, w)
    (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    return [y, gradient, *torch.autograd.grad(gradient.square().sum(), [x, w])]


@pytest.mark.parametrize("preserve", [False, True])
def test_second_order(preserve: bool):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 3, 6, 6), (4, 3, 3, 3)]
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
    got = on_xla(lambda *t: step(*t, preserve=preserve), *inputs)
    assert worst_error(got, step(*inputs, preserve=preserve, checkpointed=False)) < 1e-10


def dropped(preserve: bool) -> bool:
    """Whether the recomputed forward drops what the forward dropped."""
    masks = []

    def net(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5)
        masks.append((y.detach() != 0).clone())
        return y.exp()

    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    extra = {"use_reentrant": False, "preserve_rng_state": preserve}
    checkpoint(net, x, **extra).sum().backward()
    first, second = on_xla(lambda: masks)
    return torch.equal(first, second)


def test_dropout_is_recomputed_with_the_same_mask():
    assert dropped(preserve=True)
    assert not dropped(preserve=False)


def test_the_generator_goes_back():
    state = torch.xla.get_rng_state()
    first = torch.rand(8, device=DEVICE)
    torch.xla.set_rng_state(state)
    again = torch.rand(8, device=DEVICE)
    other = torch.rand(8, device=DEVICE)
    first, again, other = on_xla(lambda: [first, again, other])
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match=r"new_state must be a uint8 tensor of shape \[8\]"):
        torch.xla.set_rng_state(torch.get_rng_state())


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_checkpointed_derivative(order: int):
    given = checkpointed.inputs(torch.float64)
    got = on_xla(partial(checkpointed.derivatives, torch_convfix.checkpoint, order), *given)
    want = checkpointed.derivatives(checkpointed.plain, order, *given)
    assert worst_error(got, want) < 1e-10


def test_a_checkpointed_dropout_has_the_same_mask():
    def function(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).exp()

    x = torch.ones(1000, device=DEVICE, requires_grad=True)
    y = torch_convfix.checkpoint(function, x)
    # exp(2) with the derivative 2 exp(2) where it is kept, 1 with the derivative 0 where not.
    (gradient,) = torch.autograd.grad(y.sum(), x)
    y, gradient = on_xla(lambda: [y.detach(), gradient])
    assert torch.equal(gradient != 0, y != 1) and 300 < (gradient != 0).sum() < 700


def temporaries(apply, order: int) -> int:
    """Bytes of a step of four blocks on a TPU, by its compiler."""

    def block(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return ((x @ v).sigmoid() @ w).sigmoid()

    def step(x: Tensor, *weights: Tensor) -> Sequence[Tensor]:
        y = x
        for v, w in zip(weights[::2], weights[1::2], strict=True):
            y = apply(block, y, v, w)
        loss = y.sum()
        for _ in range(order - 1):
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = g.square().sum()
        return torch.autograd.grad(loss, weights)

    inputs = [torch.rand(s, requires_grad=True) for s in [(2**17, 128), *[(128, 128)] * 8]]
    return tpu.compile(step, *inputs, stack="torch_xla").temporary_bytes


@pytest.mark.parametrize("order", [1, 2])
def test_less_memory_of_a_tpu(order: int):
    most = 0.7 * temporaries(checkpointed.plain, order)
    assert temporaries(torch_convfix.checkpoint, order) < most


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_at_second_order(training: bool):
    """A barrier must not make statistics differentiable, which batch norm refuses."""

    def results(apply, device: torch.device) -> Sequence[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        module.double().train(training).to(device)
        x = torch.randn(4, 2, 5, 5, dtype=torch.float64).to(device).requires_grad_()
        (g,) = torch.autograd.grad(apply(module, x).square().sum(), x, create_graph=True)
        gradients = torch.autograd.grad(g.square().sum(), [x, *module.parameters()])
        return [g, *gradients, *module.buffers()]

    got = on_xla(lambda: results(torch_convfix.checkpoint, DEVICE))
    want = [t.detach() for t in results(checkpointed.plain, torch.device("cpu"))]
    assert worst_error(got, want) < 1e-10
