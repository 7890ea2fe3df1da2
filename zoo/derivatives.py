"""The rows of a network: what people differentiate, as steps of a module and tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

_RATE = 0.1  # of MAML's inner step


def outputs(net: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """All tensors that it returns: some return several."""
    return [t for t in pytree.tree_leaves(_plain(net(x))) if isinstance(t, Tensor)]


def _plain(made: Any) -> Any:
    return dict(made) if isinstance(made, dict) else made


def loss(made: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Cross entropy of every output, of every pixel where it is an image."""
    return torch.stack([F.cross_entropy(y, t) for y, t in zip(made, labels, strict=True)]).sum()


def _functional(net: nn.Module, parameters: dict[str, Tensor]) -> Callable[[Tensor], Any]:
    # torch.func refuses a running mean that is written to outside of it.
    buffers = {name: b.clone() for name, b in net.named_buffers()}
    return lambda x: functional_call(net, (parameters, buffers), (x,))


def _gradient(y: Tensor, parameters: dict[str, Tensor], graph: bool = False) -> dict[str, Tensor]:
    made = torch.autograd.grad(
        y, list(parameters.values()), create_graph=graph, materialize_grads=True
    )
    return dict(zip(parameters, made, strict=True))


Inputs = tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]  # x, labels, cotangents, direction


def value(net: nn.Module, x: Tensor, labels: list[Tensor], *_: Any) -> dict[str, Tensor]:
    """The loss."""
    return {"loss": loss(outputs(net, x), labels)}


def gradient(net: nn.Module, x: Tensor, labels: list[Tensor], *_: Any) -> dict[str, Tensor]:
    """By the image and the parameters."""
    return _gradient(loss(outputs(net, x), labels), {"x": x, **dict(net.named_parameters())})


def r1(
    net: nn.Module, x: Tensor, labels: list[Tensor], cotangents: list[Tensor], *_: Any
) -> dict[str, Tensor]:
    """The penalty on the gradient by the image (Mescheder et al., 2018, equation 9), by the parameters."""
    y = torch.stack([(a * b).sum() for a, b in zip(outputs(net, x), cotangents, strict=True)])
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return _gradient(g.square().sum(), dict(net.named_parameters()))


def reverse_over_reverse(
    net: nn.Module, x: Tensor, labels: list[Tensor], _: Any, direction: list[Tensor]
) -> dict[str, Tensor]:
    """Hessian-vector product, by differentiating the gradient's product with the direction."""
    parameters = dict(net.named_parameters())
    first = _gradient(loss(outputs(net, x), labels), parameters, graph=True)
    products = [(g * v).sum() for g, v in zip(first.values(), direction, strict=True)]
    return _gradient(torch.stack(products).sum(), parameters)


def forward_over_reverse(
    net: nn.Module, x: Tensor, labels: list[Tensor], _: Any, direction: list[Tensor]
) -> dict[str, Tensor]:
    """The same by the tangent of the gradient."""
    parameters = dict(net.named_parameters())

    def of_parameters(p: dict[str, Tensor]) -> Tensor:
        return loss(outputs(_functional(net, p), x), labels)

    along = dict(zip(parameters, direction, strict=True))
    return torch.func.jvp(torch.func.grad(of_parameters), (parameters,), (along,))[1]


def maml(net: nn.Module, x: Tensor, labels: list[Tensor], *_: Any) -> dict[str, Tensor]:
    """The gradient through one step of gradient descent (Finn et al., 2017, algorithm 1)."""
    slow = dict(net.named_parameters())
    first = _gradient(loss(outputs(_functional(net, slow), x), labels), slow, graph=True)
    fast = {name: p - _RATE * first[name] for name, p in slow.items()}
    query = loss(outputs(_functional(net, fast), x.flip(0)), labels)
    return _gradient(query, slow)


ROWS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "value": value,
    "gradient": gradient,
    "R1 penalty": r1,
    "Hv, reverse over reverse": reverse_over_reverse,
    "Hv, forward over reverse": forward_over_reverse,
    "MAML": maml,
}


def inputs(net: nn.Module, shape: tuple[int, ...]) -> Inputs:
    """What the rows take, at random."""
    x = torch.randn(shape).requires_grad_()
    with torch.no_grad():
        made = outputs(net, x)
    labels = [torch.randint(y.shape[1], (y.shape[0], *y.shape[2:])) for y in made]
    cotangents = [torch.randn_like(y) for y in made]
    return x, labels, cotangents, [torch.randn_like(p) for p in net.parameters()]
