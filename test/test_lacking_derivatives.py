"""Second derivatives that PyTorch lacks, on the CPU: of every kind, against formulas written out."""

from functools import partial

import pytest
import torch
from lacking import OPERATORS, Operator
from support import derivatives, worst_error
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import torch_convfix

TOLERANCE = 3e-8  # hardsigmoid's own gradient takes 1 / 6 in float32


@pytest.fixture(autouse=True)
def on_cpu():
    with torch_convfix.enabled("cpu"):
        yield


@pytest.fixture(params=OPERATORS)
def operator(request):
    return OPERATORS[request.param]


# Scaled by frequency, a gradient is not the value's, and there is no one Hessian.
TRUE_GRADIENTS = [name for name in OPERATORS if "by frequency" not in name]


def leaves(operator: Operator) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in operator.inputs]


def scalar(function, *inputs: Tensor) -> Tensor:
    value = function(*inputs)
    cotangent = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    return (torch.tanh(value) * cotangent).sum()


def test_orders(operator):
    want = derivatives(operator.formula, operator.inputs, 3)
    assert worst_error(derivatives(operator.call, operator.inputs, 3), want) < TOLERANCE


def test_gradients_of_gradients(operator):
    assert gradgradcheck(operator.call, leaves(operator), check_fwd_over_rev=True)


@pytest.mark.parametrize("operator", TRUE_GRADIENTS, indirect=True)
def test_gradients(operator):
    assert gradcheck(operator.call, leaves(operator), check_forward_ad=True)


def test_first_derivative_is_stock(operator):
    def first():
        inputs = leaves(operator)
        return torch.autograd.grad(scalar(operator.call, *inputs), inputs)

    got = first()
    with torch_convfix.disabled("cpu"):
        want = first()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("operator", TRUE_GRADIENTS, indirect=True)
@pytest.mark.parametrize("outer", [torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("inner", [torch.func.jacfwd, torch.func.jacrev])
def test_hessian(operator, outer, inner):
    def hessian(function, outer, inner):
        return outer(inner(partial(scalar, function)))(*operator.inputs)

    want = hessian(operator.formula, torch.func.jacrev, torch.func.jacrev)
    assert worst_error([hessian(operator.call, outer, inner)], [want]) < TOLERANCE


def test_vmap_of_grad_of_grad(operator):
    def penalty(function, *inputs):
        gradient = torch.func.grad(partial(scalar, function))(*inputs)
        return (torch.sin(gradient) * gradient).sum()

    batch = [torch.stack([t, 0.9 * t]) for t in operator.inputs]
    got = torch.func.vmap(torch.func.grad(partial(penalty, operator.call)))(*batch)
    one = torch.func.grad(partial(penalty, operator.formula))
    want = torch.stack([one(*inputs) for inputs in zip(*batch, strict=True)])
    assert worst_error([got], [want]) < TOLERANCE


@pytest.mark.parametrize("p", [0.0, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, float("inf")])
@pytest.mark.parametrize("function", ["cdist", "pdist"])
def test_where_points_and_coordinates_coincide(function, p):
    """The first derivative is core's, whether it has a graph or not, and the second is finite."""
    x = torch.tensor([[1.0, 2, 3], [1, 2, 3], [1, 0, 5], [3, 4, 1]], dtype=torch.float64)
    x.requires_grad_()
    distances = torch.cdist(x, x + 0, p) if function == "cdist" else torch.pdist(x, p)
    cotangent = torch.linspace(0.5, 1.5, distances.numel(), dtype=x.dtype).reshape(distances.shape)
    cotangent.requires_grad_()
    loss = (distances * cotangent).sum()
    (want,) = torch.autograd.grad(loss, x, retain_graph=True)
    (got,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(got, want)
    second = torch.autograd.grad(torch.sin(got).sum(), [x, cotangent], allow_unused=True)
    assert all(t is None or t.isfinite().all() for t in second)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), ()])
def test_hardsigmoid_of_any_shape(shape):
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(
        (torch.nn.functional.hardsigmoid(x) ** 2).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full(shape, 1 / 18, dtype=torch.float64))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_hardsigmoid_of_what_is_written_in_place(memory_format):
    def network(x, activation):
        y = torch.nn.functional.conv2d(x, weight)
        return activation(y.mul_(2))

    weight = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(2, 2, 3, 3)
    x = OPERATORS["hardsigmoid"].inputs[0].new_tensor(range(100)).sin().reshape(2, 2, 5, 5)
    x = x.contiguous(memory_format=memory_format)
    activations = (torch.nn.Hardsigmoid(inplace=True), OPERATORS["hardsigmoid"].formula)
    got, want = (derivatives(partial(network, activation=a), [x], 3) for a in activations)
    assert worst_error(got, want) < TOLERANCE


def test_bfloat16():
    """As far from float64 as eight bits are."""
    for name in ("hardsigmoid", "segment_reduce prod lengths", "segment_reduce mean offsets"):
        operator = OPERATORS[name]
        rounded = [t.bfloat16() for t in operator.inputs]
        want = derivatives(operator.formula, [t.double() for t in rounded], 2)
        assert worst_error(derivatives(operator.call, rounded, 2), want) < 0.05, name
