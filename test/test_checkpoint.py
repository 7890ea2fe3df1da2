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


def test_without_grad_it_is_the_function():
    x = torch.rand(3, requires_grad=True)
    with torch.no_grad():
        assert not checkpoint(lambda x: x.exp(), x).requires_grad
    (gradient,) = torch.autograd.grad(checkpoint(lambda x: x.exp(), x).sum(), x)
    with torch.no_grad():
        assert torch.allclose(gradient, x.exp())


def test_an_argument_that_is_written_is_refused():
    x = torch.rand(3, requires_grad=True)
    for function in (lambda y: y.mul_(2), lambda y: F.relu(y[:1], inplace=True)):
        with pytest.raises(ValueError, match="args must not be written in place"):
            checkpoint(function, x * 1)


def test_a_view_of_an_argument_is_written_after():
    x = torch.rand(4, dtype=torch.float64, requires_grad=True)
    y = checkpoint(lambda x: x[:2], x * 1)
    y.mul_(3)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.tolist() == [3, 3, 0, 0]


def test_a_result_without_gradient_is_no_zero_within():
    x, y = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    a, _ = checkpoint(lambda x, y: (x.square(), y.sqrt()), x, y - y.detach())
    g, h = torch.autograd.grad(a.sum(), [x, y], allow_unused=True)
    assert h is None and torch.allclose(g, 2 * x)


@pytest.mark.parametrize("result", [object(), torch.Generator(), {1, 2}])
def test_a_result_that_could_hide_a_tensor_is_refused(result):
    with pytest.raises(TypeError, match=f"got {type(result).__name__}"):
        checkpoint(lambda x: [x, result], torch.rand(3, requires_grad=True))


def test_plain_results_come_back():
    plain = [None, 1, 2.5, True, "a", torch.float32, torch.device("cpu"), torch.Size([2])]
    assert checkpoint(lambda x: [x, *plain], torch.rand(3))[1:] == plain


def test_every_result_detached():
    x = torch.rand(3, requires_grad=True)
    y = checkpoint(lambda x: x.detach() + 1, x)
    (gradient,) = torch.autograd.grad(y.sum(), x, allow_unused=True)
    assert gradient is None


def test_a_generator_draws_the_same():
    generator = torch.Generator().manual_seed(0)

    def function(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.exp() * torch.rand(x.shape, generator=generator)

    x = torch.zeros(5, requires_grad=True)
    y = checkpoint(function, x, generator)
    later = torch.rand(2, generator=generator)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y)
    generator.manual_seed(0)
    torch.rand(5, generator=generator)
    assert torch.equal(later, torch.rand(2, generator=generator))


def test_a_module_is_as_it_was_in_the_forward():
    x = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    module = nn.Dropout(0.9)
    y = checkpoint(module, x)
    module.eval()
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient == 0, y == 0)


def test_a_buffer_that_requires_a_gradient():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.rand(3, requires_grad=True))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module, x = Scaled(), torch.rand(3)
    (gradient,) = torch.autograd.grad(checkpoint(module, x).sum(), module.scale)
    assert torch.equal(gradient, x)


def recurrent() -> nn.Module:
    class Recurrent(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    return Recurrent(3, 3)


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), backend="eager")


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh())


@pytest.mark.parametrize("make", [recurrent, traced, compiled, parametrized])
def test_modules_of_every_making(make):
    torch.manual_seed(0)
    module = make().double()
    x = torch.rand(2, 4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for apply in (checkpoint, plain):
        module.zero_grad()
        (g,) = torch.autograd.grad(apply(module, x).square().sum(), x, create_graph=True)
        g.square().sum().backward()
        found.append([g.detach(), *(p.grad.clone() for p in module.parameters())])
    assert worst_error(*found) < 1e-12


def test_a_scripted_module_is_refused():
    module = torch.jit.trace(nn.Linear(3, 3), torch.rand(2, 3))
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.ScriptModule"):
        checkpoint(module, torch.rand(2, 3, requires_grad=True))


def test_what_a_module_counts_is_counted_once():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.exp()

    module, x = Counts(), torch.rand(3, requires_grad=True)
    checkpoint(module, x).sum().backward()
    assert module.calls == 1


def test_a_tensor_that_a_module_keeps_is_refused():
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.exp()
            return self.last

    with pytest.raises(ValueError, match=r"Keeps keeps a tensor as \.last"):
        checkpoint(Keeps(), torch.rand(3, requires_grad=True))


def test_a_batch_of_gradients_is_refused():
    x = torch.rand(3, requires_grad=True)
    y = checkpoint(lambda x: x.exp(), x)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
