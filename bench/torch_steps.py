"""The workloads in PyTorch: each function returns a step and its inputs."""

from collections.abc import Callable
from functools import partial

import layers
import nets
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call

Workload = tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]


def _conv(layer: layers.Layer, x: Tensor, w: Tensor) -> Tensor:
    if layer.transposed:
        return F.conv_transpose2d(x, w, None, 2, 1, layer.output_padding, layer.groups)
    return F.conv2d(x, w, None, 2, 1, 1, layer.groups)


def _inputs(layer: layers.Layer) -> list[Tensor]:
    return [torch.rand(s, requires_grad=True) for s in (layer.input_size, layer.weight_size)]


def _penalty(layer: layers.Layer) -> Workload:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(_conv(layer, x, w)).mean()
        grads = grad(y, [w, x], create_graph=True)
        return grad(sum((g * g).sum() for g in grads), [w, x])

    return step, _inputs(layer)


def _forward_backward(layer: layers.Layer) -> Workload:
    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return grad(torch.tanh(_conv(layer, x, w)).mean(), [w, x])

    return step, _inputs(layer)


def _parameters(model: nn.Module) -> tuple[list[str], list[Tensor]]:
    named = dict(model.named_parameters())
    return list(named), list(named.values())


def _r1(name: str) -> Workload:
    model = nets.classifier(name)
    names, parameters = _parameters(model)

    def step(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        y = functional_call(model, dict(zip(names, parameters, strict=True)), (x,))
        (g,) = grad(y.sum(), x, create_graph=True)
        # A last bias has no part in the penalty.
        return grad((g * g).sum(), parameters, allow_unused=True)

    return step, [torch.rand(32, 3, 224, 224, requires_grad=True), *parameters]


def __getattr__(name: str) -> Callable[[], Workload]:
    """The workload of one layer or one model by its name."""
    for kind, make in (
        (layers.PENALTIES, _penalty),
        (layers.FORWARD_BACKWARDS, _forward_backward),
        (layers.MODELS, _r1),
    ):
        if name in kind:
            return partial(make, kind[name])
    raise AttributeError(name)


def wgan_gp() -> Workload:
    generator, critic = nets.generator(), nets.critic()
    g_names, g_parameters = _parameters(generator)
    c_names, c_parameters = _parameters(critic)

    def step(z: Tensor, real: Tensor, t: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        of_generator, of_critic = parameters[: len(g_names)], parameters[len(g_names) :]

        def score(x: Tensor) -> Tensor:
            return functional_call(critic, dict(zip(c_names, of_critic, strict=True)), (x,))

        fake = functional_call(generator, dict(zip(g_names, of_generator, strict=True)), (z,))
        between = t * real + (1 - t) * fake.detach()
        (g,) = grad(score(between).sum(), between, create_graph=True)
        penalty = ((g.square().sum((1, 2, 3)).sqrt() - 1) ** 2).mean()
        loss = score(fake.detach()).mean() - score(real).mean() + 10 * penalty
        return (
            *grad(loss, of_critic, allow_unused=True),
            *grad(-score(fake).mean(), of_generator),
        )

    inputs = [torch.rand(64, 100, 1, 1), torch.rand(64, 3, 64, 64, requires_grad=True)]
    return step, [*inputs, torch.rand(64, 1, 1, 1), *g_parameters, *c_parameters]


def maml() -> Workload:
    model = nets.conv4()
    names, parameters = _parameters(model)

    def step(
        support: Tensor, query: Tensor, targets: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        def loss(x: Tensor, values: tuple[Tensor, ...]) -> Tensor:
            y = functional_call(model, dict(zip(names, values, strict=True)), (x,))
            return -(F.log_softmax(y, 1) * targets).sum(1).mean()

        grads = grad(loss(support, parameters), parameters, create_graph=True)
        fast = tuple(p - 0.4 * g for p, g in zip(parameters, grads, strict=True))
        return grad(loss(query, fast), parameters)

    images = [torch.rand(25, 1, 28, 28), torch.rand(25, 1, 28, 28)]
    return step, [*images, torch.eye(5).repeat(5, 1), *parameters]
