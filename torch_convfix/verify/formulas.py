"""Elementary formulas for the operators whose derivatives PyTorch itself gets wrong, on every device.

What follows forward mode, and order 3, of layer_norm, and of batch_norm and instance_norm by the batch's
statistics, lacks the derivatives of these statistics (torch 2.9 and 2.13), so that PyTorch's CPU
kernels are no reference. The formulas are those in the documentation of torch.nn.LayerNorm, GroupNorm,
BatchNorm2d and InstanceNorm2d.
"""

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor


@contextlib.contextmanager
def formulas() -> Iterator[None]:
    """The formulas in the place of torch's functions, which torch.nn.functional calls."""
    with contextlib.ExitStack() as stack:
        for function in (layer_norm, group_norm, batch_norm, instance_norm):
            stack.enter_context(mock.patch.object(torch, function.__name__, function))
        yield


def _normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / (((x - mean) ** 2).mean(dims, keepdim=True) + eps).sqrt()


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    y = y if weight is None else y * weight.reshape(sizes)
    return y if bias is None else y + bias.reshape(sizes)


def _channels(x: Tensor) -> list[int]:
    return [1, x.shape[1], *(1 for _ in x.shape[2:])]


def layer_norm(x: Tensor, normalized_shape, weight=None, bias=None, eps=1e-5, *_: object) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    return _affine(_normalized(x, dims, eps), weight, bias, normalized_shape)


def group_norm(x: Tensor, num_groups: int, weight=None, bias=None, eps=1e-5, *_: object) -> Tensor:
    y = _normalized(x.reshape(x.shape[0], num_groups, -1), [2], eps).reshape(x.shape)
    return _affine(y, weight, bias, _channels(x))


def batch_norm(
    x: Tensor, weight, bias, running_mean, running_var, training, momentum, eps, *_: object
) -> Tensor:
    if not training:
        return _by_running(x, weight, bias, running_mean, running_var, eps)
    dims = [0, *range(2, x.dim())]
    _update(running_mean, running_var, momentum, *_statistics(x, dims))
    return _affine(_normalized(x, dims, eps), weight, bias, _channels(x))


def instance_norm(
    x: Tensor, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, *_: object
) -> Tensor:
    if not use_input_stats:
        return _by_running(x, weight, bias, running_mean, running_var, eps)
    dims = list(range(2, x.dim()))
    _update(running_mean, running_var, momentum, *(t.mean(0) for t in _statistics(x, dims)))
    return _affine(_normalized(x, dims, eps), weight, bias, _channels(x))


def _by_running(x: Tensor, weight, bias, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    sizes = _channels(x)
    y = (x - mean.reshape(sizes)) / (variance.reshape(sizes) + eps).sqrt()
    return _affine(y, weight, bias, sizes)


def _statistics(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    return x.detach().mean(dims), x.detach().var(dims)


def _update(running_mean, running_var, momentum: float, mean: Tensor, variance: Tensor) -> None:
    for running, new in ((running_mean, mean), (running_var, variance)):
        if running is not None:
            running.lerp_(new, momentum)
