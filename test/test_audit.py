"""The audit names the call that is to blame, and is silent about a right model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_convfix.verify.audit import audit


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    )


def images() -> torch.Tensor:
    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def labels() -> torch.Tensor:
    return torch.tensor([0, 3, 2, 2])


def maml(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss after one inner step: a gradient is inside."""
    weights = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
    return sum(((w - 0.1 * g) ** 2).sum() for w, g in zip(weights, gradients, strict=True))


def elu_critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ELU(), nn.Flatten(), nn.Linear(108, 1))


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * 1.01


class _WrongOnTheDevice(_Wrong):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * (1 if x.device.type == "cpu" else -1)


class _Right(_Wrong):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def planted(function: type[torch.autograd.Function]):
    return lambda x: (function.apply(x * 2) ** 2).sum()


@pytest.mark.parametrize("function", [_Wrong, _Right])
def test_finds_a_custom_function_that_is_wrong_everywhere(function):
    report = audit(planted(function), torch.rand(3, requires_grad=True), device="cpu", order=1)
    assert [b.name for b in report.blamed] == (["_Wrong"] if function is _Wrong else [])
    assert report.ok == (function is _Right)
    if function is _Wrong:
        assert "test_audit.py" in report.blamed[0].where


def test_a_right_model_is_clean_on_the_cpu():
    report = audit(maml, net(), images(), labels(), device="cpu")
    assert report.ok, str(report)
    assert list(report.outcome.errors) == ["value", "order 1", "order 2"]


def test_inner_modules_keep_their_buffers():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    before = model[1].running_mean.clone()
    report = audit(lambda m, x: m(x).pow(3).sum(), model, images(), device="cpu")
    assert report.ok, str(report)
    assert torch.equal(model[1].running_mean, before)


xla = pytest.mark.xla


def names(report) -> set[str]:
    return {b.name.rsplit(".", 1)[-1] for b in report.blamed}


@xla
def test_finds_max_pool2d_in_maml_under_stock_torch_xla():
    report = audit(maml, net(), images(), labels(), device="xla", order=1, stock=True)
    assert "order 1" in report.outcome.wrong, str(report)
    assert names(report) == {"max_pool2d"}, str(report)
    assert audit(maml, net(), images(), labels(), device="xla", order=1).ok


@xla
def test_finds_elu_in_a_wgan_critic_under_stock_torch_xla():
    x = images().requires_grad_()
    report = audit(lambda critic, x: critic(x).mean(), elu_critic(), x, device="xla", stock=True)
    assert names(report) == {"elu"}, str(report)
    assert audit(lambda critic, x: critic(x).mean(), elu_critic(), x, device="xla").ok


@xla
def test_finds_a_custom_function_that_is_wrong_on_the_device():
    x = torch.rand(3, requires_grad=True)
    report = audit(planted(_WrongOnTheDevice), x, device="xla", order=1)
    assert names(report) == {"_WrongOnTheDevice"}, str(report)


def maml_case():
    """For the command line, in a process of its own."""
    return maml, net(), images(), labels()
