"""Models and losses that the audit's tests share."""

import torch
import torch.nn.functional as F
from torch import nn


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


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * 1.01


class WrongOnTheDevice(Wrong):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * (1 if x.device.type == "cpu" else -1)


class WrongInSingle(Wrong):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos() * (2 if x.dtype == torch.float32 else 1)


class Right(Wrong):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def planted(function: type[torch.autograd.Function]):
    return lambda x: (function.apply(x * 2) ** 2).sum()


def in_place_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))


class WrittenSlice(nn.Module):
    def forward(self, x):
        x = x.clone()
        x[:, 0] = x[:, 1] * 2
        return x


def written_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), WrittenSlice(), nn.MaxPool2d(2))


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """R1, of images that the loss itself makes differentiable."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return g.square().sum()


def product(w, v, x, y):
    """A Hessian-vector product, forward over reverse."""

    def loss(w):
        return F.cross_entropy(x @ w, y)

    return torch.func.jvp(torch.func.grad(loss), (w,), (v,))[1]


def hessian(w, x, y):
    return torch.func.hessian(lambda w: F.cross_entropy(F.conv2d(x, w), y))(w)


def pool_product(x, v):
    def loss(x):
        return F.adaptive_max_pool2d(x.sin(), 2).pow(3).sum()

    return torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def maml_case():
    """For the command line, in a process of its own."""
    return maml, net(), images(), labels()
