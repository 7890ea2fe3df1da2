"""Normalizations differentiate right after forward mode and at order 3, where PyTorch's own do not."""

import contextlib

import pytest
import torch
from norms import BATCHED, CASES, WORDS, batch_norm, outside_of_vmap, results
from support import worst_error
from torch.func import hessian, vmap

import torch_convfix


@pytest.fixture
def ours():
    with torch_convfix.enabled("cpu"):
        yield


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", CASES)
def test_against_the_formula(ours, name, word):
    function, formula, _ = CASES[name]
    got, want = (results(word, f, name, "cpu") for f in (function, formula))
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize("word", ["FR", "FF", "RRR"])
@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "instance_norm"])
def test_pytorch_is_wrong(name, word):
    function, formula, _ = CASES[name]
    with torch_convfix.disabled("cpu"):
        got = results(word, function, name, "cpu")
    assert worst_error(got, results(word, formula, name, "cpu")) > 0.1, "mended upstream: say so"


@pytest.mark.parametrize("name", CASES)
def test_gradgradcheck(ours, name):
    function, _, size = CASES[name]
    inputs = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), size, size)
    ]
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", CASES)
def test_orders_1_to_4_by_autograd(ours, name):
    function, formula, size = CASES[name]

    def orders(f):
        generator = torch.Generator().manual_seed(0)
        x, w, b = (
            torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_()
            for s in ((3, 4, 5), size, size)
        )
        result, taken = f(x, w, b).sin().sum(), []
        for _ in range(4):
            gradients = torch.autograd.grad(
                result, (x, w, b), create_graph=True, materialize_grads=True
            )
            taken += gradients
            result = sum(g.cos().sum() for g in gradients)
        return [t.detach() for t in taken]

    assert worst_error(orders(function), orders(formula)) < 1e-10


@pytest.mark.parametrize("name", BATCHED)
def test_hessian_under_vmap(ours, name):
    function, formula, size = CASES[name]
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    w, b = torch.randn(2, size, dtype=torch.float64)

    def taken(f):
        return [vmap(hessian(lambda x: f(x, w, b).sin().sum()))(x)]

    assert worst_error(taken(function), taken(formula)) < 1e-10


@pytest.mark.parametrize("name", BATCHED)
def test_reverse_over_vmap_over_reverse(ours, name):
    function, formula, _ = CASES[name]
    got, want = outside_of_vmap(function, name), outside_of_vmap(formula, name)
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize(
    "name", ["layer_norm", "instance_norm", "batch_norm without running statistics"]
)
def test_pytorch_is_wrong_outside_of_vmap(name):
    function, formula, _ = CASES[name]
    with contextlib.ExitStack() as stack:
        for device in {r.device for r in torch_convfix.status().registrations} - {"meta"}:
            stack.enter_context(torch_convfix.disabled(device))  # vmap's rule is for all of them
        got = outside_of_vmap(function, name)
    assert worst_error(got, outside_of_vmap(formula, name)) > 0.01, "mended upstream: say so"


def test_running_statistics_are_updated_as_ever(ours):
    x, t = torch.randn(2, 3, 4, 5, dtype=torch.float64).unbind()
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    torch.func.jvp(
        lambda x: torch.nn.functional.batch_norm(x, mean, variance, training=True), (x,), (t,)
    )
    torch.testing.assert_close(mean, 0.1 * x.mean((0, 2)))
    torch.testing.assert_close(variance, 0.9 + 0.1 * x.var((0, 2)))


@pytest.mark.parametrize("create_graph", [False, True])
def test_first_derivative_is_bitwise_that_of_stock(create_graph):
    x = torch.randn(3, 4, 5, requires_grad=True)
    w, b = torch.randn(2, 4)

    def gradient():
        y = batch_norm(x, w, b, training=True).sin().sum()
        return torch.autograd.grad(y, x, create_graph=create_graph)[0]

    with torch_convfix.disabled("cpu"):
        stock = gradient()
    with torch_convfix.enabled("cpu"):
        assert torch.equal(gradient(), stock)
