"""torch_convfix.checkpoint on the CPU: the same numbers at every order, less kept."""

import pytest
import torch
from checkpointed import derivatives, inputs, plain
from support import worst_error
from torch import Tensor, nn
from torch.nn import functional as F

from torch_convfix import checkpoint


@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_order_is_that_of_the_function(order):
    given = inputs(torch.float64)
    got, expected = (derivatives(apply, order, *given) for apply in (checkpoint, plain))
    assert worst_error(got, expected) < 1e-13


def test_gradgradcheck():
    w = torch.rand(2, 2, 3, 3).double().requires_grad_()
    x = torch.rand(1, 2, 4, 4).double().requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda *t: checkpoint(lambda x, w: F.conv2d(x, w).tanh(), *t), [x, w]
    )


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5)
    return nn.Sequential(*layers).double()


def test_a_module_is_trained_and_its_statistics_move_once():
    x = torch.rand(4, 2, 5, 5, dtype=torch.float64)
    found = []
    for apply in (checkpoint, plain):
        module = net()
        torch.manual_seed(1)
        apply(module, x).square().sum().backward()
        after = torch.rand(3)
        found.append([*(p.grad for p in module.parameters()), *module.buffers(), after])
    assert worst_error(*found) < 1e-13


def kept(apply, create_graph: bool) -> int:
    """How many numbers are kept for the first derivative, or by it for the second."""
    block = (nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    blocks = [nn.Sequential(*block).requires_grad_() for _ in range(4)]
    x = torch.rand(64, 8, requires_grad=True)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with hooks:
        for one in blocks:
            x = apply(one, x)
        loss = x.square().sum()
        if create_graph:
            saved.clear()
            torch.autograd.grad(loss, blocks[0][0].weight, create_graph=True)
    return sum({t.data_ptr(): t.numel() for t in saved if t.dim() > 1}.values())


@pytest.mark.parametrize("create_graph", [False, True])
def test_only_the_arguments_are_kept(create_graph):
    assert kept(checkpoint, create_graph) < 0.6 * kept(plain, create_graph)


def test_structures_and_what_has_no_gradient():
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)

    def function(of, scale):
        values, indices = of["x"].max(1)
        return {"values": scale * values, "indices": indices, "count": 3}

    result = checkpoint(function, {"x": x}, 2)
    assert result["count"] == 3 and not result["indices"].requires_grad
    (gradient,) = torch.autograd.grad(result["values"].sum(), x)
    assert torch.equal(gradient, 2.0 * F.one_hot(x.argmax(1), 3))


def test_what_is_not_used_has_no_gradient():
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    g, none = torch.autograd.grad(
        checkpoint(lambda x, y: x.exp(), x, y).sum(), [x, y], allow_unused=True, create_graph=True
    )
    assert none is None
    (h,) = torch.autograd.grad(g.sum(), x)
    assert torch.allclose(h, x.exp())


def test_a_tensor_that_is_closed_over_is_refused():
    w = torch.rand(3, requires_grad=True)
    with pytest.raises(ValueError, match="function must compute with its arguments alone"):
        checkpoint(lambda x: x * w, torch.rand(3))


def test_a_transform_is_refused():
    with pytest.raises(NotImplementedError, match=r"not within a transform of torch.func"):
        torch.func.grad(lambda x: checkpoint(torch.sin, x).sum())(torch.rand(3))


def test_autocast_is_as_it_was():
    seen = []

    def function(x, w):
        y = x @ w
        seen.append(y.dtype)
        return y

    x = torch.rand(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(function, x, x)
    y.sum().backward()
    assert seen == [torch.bfloat16] * 2
