"""The same workloads with jax.lax and jax.grad; the networks are read off the PyTorch ones."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import layers
import nets
import torch
import torch.fx
import torch_steps
from jax import lax
from torch import nn

Workload = tuple[Callable[..., Any], list[torch.Tensor]]


def _conv(
    x: Any,
    w: Any,
    stride: tuple[int, int],
    padding: tuple[int, int],
    groups: int,
    transposed: bool = False,
    output_padding: tuple[int, int] = (0, 0),
) -> Any:
    if not transposed:
        pads = [(p, p) for p in padding]
        return lax.conv_general_dilated(x, w, stride, pads, feature_group_count=groups)
    i, o, *kernel = w.shape
    w = (
        w.reshape(groups, i // groups, o, *kernel)
        .swapaxes(1, 2)
        .reshape(groups * o, i // groups, *kernel)
    )
    pads = [
        (k - 1 - p, k - 1 - p + q) for k, p, q in zip(kernel, padding, output_padding, strict=True)
    ]
    return lax.conv_general_dilated(
        x, jnp.flip(w, (2, 3)), (1, 1), pads, lhs_dilation=stride, feature_group_count=groups
    )


def _layer(layer: layers.Layer, x: Any, w: Any) -> Any:
    extra = (layer.output_padding,) * 2
    return _conv(x, w, (2, 2), (1, 1), layer.groups, layer.transposed, extra)


def _loss(layer: layers.Layer) -> Callable[[Any, Any], Any]:
    return lambda x, w: jnp.tanh(_layer(layer, x, w)).mean()


def _forward_backward(layer: layers.Layer) -> Callable[..., Any]:
    return jax.grad(_loss(layer), (0, 1))


def _penalty(layer: layers.Layer) -> Callable[..., Any]:
    first = _forward_backward(layer)
    return jax.grad(lambda x, w: sum((g * g).sum() for g in first(x, w)), (0, 1))


def _batch_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    mean = x.mean((0, 2, 3), keepdims=True)
    variance = x.var((0, 2, 3), keepdims=True)
    scale = lax.rsqrt(variance + eps) * weight[:, None, None]
    return (x - mean) * scale + bias[:, None, None]


def _max_pool(x: Any, kernel: int, stride: int, padding: int) -> Any:
    window, strides = (1, 1, kernel, kernel), (1, 1, stride, stride)
    pads = ((0, 0), (0, 0), (padding, padding), (padding, padding))
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads)


def _call_module(m: nn.Module, x: Any, p: Callable[[str], Any]) -> Any:
    match m:
        case nn.Conv2d() | nn.ConvTranspose2d():
            transposed = isinstance(m, nn.ConvTranspose2d)
            y = _conv(x, p("weight"), m.stride, m.padding, m.groups, transposed, m.output_padding)
            return y if m.bias is None else y + p("bias")[:, None, None]
        case nn.BatchNorm2d():
            return _batch_norm(x, p("weight"), p("bias"), m.eps)
        case nn.Linear():
            return x @ p("weight").T + p("bias")
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.ReLU6():
            return jnp.clip(x, 0, 6)
        case nn.SiLU():
            return jax.nn.silu(x)
        case nn.Sigmoid():
            return jax.nn.sigmoid(x)
        case nn.Tanh():
            return jnp.tanh(x)
        case nn.LeakyReLU():
            return jnp.where(x > 0, x, m.negative_slope * x)
        case nn.Identity():
            return x
        case nn.Flatten():
            return x.reshape(x.shape[0], -1)
        case nn.MaxPool2d():
            return _max_pool(x, m.kernel_size, m.stride, m.padding)
        case nn.AdaptiveAvgPool2d():
            return x.mean((2, 3), keepdims=True)
    raise NotImplementedError(type(m))


def _call_function(target: Any, args: tuple[Any, ...]) -> Any:
    match getattr(target, "__name__", target):
        case "add":
            return operator.add(*args)
        case "mul":
            return operator.mul(*args)
        case "flatten":
            return args[0].reshape(args[0].shape[0], -1)
        case "adaptive_avg_pool2d":
            return args[0].mean((2, 3), keepdims=True)
    raise NotImplementedError(target)


def _apply(model: nn.Module) -> Callable[[dict[str, Any], Any], Any]:
    """The model's forward as a function of its parameters by name and its input."""
    traced = torch.fx.symbolic_trace(model)
    modules = dict(traced.named_modules())

    def forward(parameters: dict[str, Any], x: Any) -> Any:
        values: dict[str, Any] = {}
        for node in traced.graph.nodes:
            args = torch.fx.map_arg(node.args, lambda n: values[n.name])
            match node.op:
                case "placeholder":
                    values[node.name] = x
                case "call_module":
                    values[node.name] = _call_module(
                        modules[node.target],
                        args[0],
                        lambda kind, of=node.target: parameters[f"{of}.{kind}"],
                    )
                case "call_function":
                    values[node.name] = _call_function(node.target, args)
                case "output":
                    return args[0]
        raise AssertionError("a graph has an output")

    return forward


def _r1(name: str) -> Callable[..., Any]:
    model = nets.classifier(name)
    names = [n for n, _ in model.named_parameters()]
    forward = _apply(model)

    def penalty(parameters: tuple[Any, ...], x: Any) -> Any:
        named = dict(zip(names, parameters, strict=True))
        g = jax.grad(lambda image: forward(named, image).sum())(x)
        return (g * g).sum()

    return lambda x, *parameters: jax.grad(penalty)(parameters, x)


def _wgan_gp() -> Callable[..., Any]:
    generator, critic = nets.generator(), nets.critic()
    g_names = [n for n, _ in generator.named_parameters()]
    c_names = [n for n, _ in critic.named_parameters()]
    generate, criticize = _apply(generator), _apply(critic)

    def step(z: Any, real: Any, t: Any, *parameters: Any) -> Any:
        of_generator = dict(zip(g_names, parameters[: len(g_names)], strict=True))
        of_critic = dict(zip(c_names, parameters[len(g_names) :], strict=True))
        fake = generate(of_generator, z)

        def critic_loss(values: dict[str, Any]) -> Any:
            between = t * real + (1 - t) * fake
            g = jax.grad(lambda x: criticize(values, x).sum())(between)
            penalty = ((jnp.sqrt((g * g).sum((1, 2, 3))) - 1) ** 2).mean()
            return criticize(values, fake).mean() - criticize(values, real).mean() + 10 * penalty

        def generator_loss(values: dict[str, Any]) -> Any:
            return -criticize(of_critic, generate(values, z)).mean()

        return jax.grad(critic_loss)(of_critic), jax.grad(generator_loss)(of_generator)

    return step


def _maml() -> Callable[..., Any]:
    model = nets.conv4()
    names = [n for n, _ in model.named_parameters()]
    forward = _apply(model)

    def step(support: Any, query: Any, targets: Any, *parameters: Any) -> Any:
        def loss(values: tuple[Any, ...], x: Any) -> Any:
            y = forward(dict(zip(names, values, strict=True)), x)
            return -(jax.nn.log_softmax(y) * targets).sum(1).mean()

        def outer(values: tuple[Any, ...]) -> Any:
            grads = jax.grad(loss)(values, support)
            fast = tuple(p - 0.4 * g for p, g in zip(values, grads, strict=True))
            return loss(fast, query)

        return jax.grad(outer)(parameters)

    return step


def __getattr__(name: str) -> Callable[[], Workload]:
    """The workload by its name, with the inputs of the PyTorch one."""
    steps = {
        **{n: partial(_penalty, layer) for n, layer in layers.PENALTIES.items()},
        **{n: partial(_forward_backward, layer) for n, layer in layers.FORWARD_BACKWARDS.items()},
        **{n: partial(_r1, model) for n, model in layers.MODELS.items()},
        "wgan_gp": _wgan_gp,
        "maml": _maml,
    }
    if name not in steps:
        raise AttributeError(name)
    return lambda: (steps[name](), getattr(torch_steps, name)()[1])
