"""Second-order MAML on scikit-learn's digits: 5-way tasks, conv-BN-ReLU-maxpool x 3, one inner step."""

from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

WAYS, SHOTS, QUERIES, CHANNELS = 5, 5, 10, 16
INNER_RATE = 0.4

Task = tuple[Tensor, Tensor, Tensor, Tensor]  # support images and labels, query images and labels


def load_images() -> dict[int, Tensor]:
    """Digit -> its images, ``[number, 1, 8, 8]``, between 0 and 1."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).unsqueeze(1) / 16
    return {d: images[torch.from_numpy(digits.target == d)] for d in range(10)}


def draw_task(images: dict[int, Tensor], generator: torch.Generator, dtype: torch.dtype) -> Task:
    """Five digits with labels in random order, so that there is something to adapt to."""
    support, query = [], []
    for digit in torch.randperm(10, generator=generator)[:WAYS].tolist():
        own = images[digit]
        chosen = own[torch.randperm(len(own), generator=generator)[: SHOTS + QUERIES]].to(dtype)
        support.append(chosen[:SHOTS])
        query.append(chosen[SHOTS:])
    labels = torch.arange(WAYS)
    return (
        torch.cat(support),
        labels.repeat_interleave(SHOTS),
        torch.cat(query),
        labels.repeat_interleave(QUERIES),
    )


def initial_parameters(generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Weight, BN scale and BN shift of each block, then the linear layer's weight and bias."""
    parameters, channels_in = [], 1
    for _ in range(3):
        w = torch.randn(CHANNELS, channels_in, 3, 3, generator=generator, dtype=torch.float64)
        parameters += [
            w * (2 / (9 * channels_in)) ** 0.5,
            torch.ones(CHANNELS),
            torch.zeros(CHANNELS),
        ]
        channels_in = CHANNELS
    w = torch.randn(WAYS, CHANNELS, generator=generator, dtype=torch.float64)
    parameters += [w / CHANNELS**0.5, torch.zeros(WAYS)]
    return [p.to(dtype).requires_grad_() for p in parameters]


def logits(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    for i in range(0, 9, 3):
        w, scale, shift = parameters[i : i + 3]
        x = F.conv2d(x, w, padding=1)
        x = F.batch_norm(x, None, None, scale, shift, training=True)
        x = F.max_pool2d(F.relu(x), 2)
    return F.linear(x.flatten(1), *parameters[9:])


def adapt(parameters: Sequence[Tensor], x: Tensor, y: Tensor, create_graph: bool) -> list[Tensor]:
    """One gradient step on the support set."""
    loss = F.cross_entropy(logits(parameters, x), y)
    gradients = torch.autograd.grad(loss, parameters, create_graph=create_graph)
    return [p - INNER_RATE * g for p, g in zip(parameters, gradients, strict=True)]


def meta_loss(parameters: Sequence[Tensor], task: Task) -> Tensor:
    support_x, support_y, query_x, query_y = task
    adapted = adapt(parameters, support_x, support_y, create_graph=True)
    return F.cross_entropy(logits(adapted, query_x), query_y)


def meta_gradient(parameters: Sequence[Tensor], task: Task) -> list[Tensor]:
    """The meta-loss and its gradient with respect to the parameters before the inner step."""
    loss = meta_loss(parameters, task)
    return [loss, *torch.autograd.grad(loss, parameters)]
