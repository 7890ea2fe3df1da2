"""Plain CPU PyTorch: the formula that others are held against, and our double backward on the CPU."""

import pytest
import torch
from support import Case, cases, check_many, derivatives, penalty_step, stock_can, worst_error

import torch_convfix
from torch_convfix.functional import conv_forward


def test_the_reference_is_the_convolution(case_share):
    """Against PyTorch's own kernels, as far as they go: a second derivative, here."""

    def check(case):
        order = 2 if stock_can(case) else 1
        want = derivatives(case.apply, case.inputs(), order)
        assert worst_error(derivatives(case.reference, case.inputs(), order), want) < 1e-10

    with torch_convfix.disabled("cpu"):
        check_many(check, cases(), 100 * case_share)


def test_third_order(case_share):
    def check(case):
        want = derivatives(case.reference, case.inputs(), 3)
        assert worst_error(derivatives(case.apply, case.inputs(), 3), want) < 1e-10

    with torch_convfix.enabled("cpu"):
        check_many(check, cases(), 200 * case_share)


def test_depthwise_penalty_step():
    """dw_gp, in float64 against stock."""
    x = torch.rand(4, 96, 28, 28, dtype=torch.float64, requires_grad=True)
    w = torch.rand(96, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    step = penalty_step({"stride": 2, "padding": 1, "groups": 96})
    with torch_convfix.disabled("cpu"):
        want = step(x, w)
    with torch_convfix.enabled("cpu"):
        got = step(x, w)
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize("missing", ["ggI", "ggW", "ggb"])
def test_undefined_cotangents(missing):
    """A gradient of convolution_backward that nothing depends on stays undefined."""
    case = Case((2, 4, 6, 6), (4, 2, 3, 3), True, (2, 2), (1, 1), (1, 1), 2)
    names = ["ggI", "ggW", "ggb"]

    def step(apply):
        inputs = [t.requires_grad_() for t in case.inputs()]
        first = torch.autograd.grad(torch.tanh(apply(*inputs)).sum(), inputs, create_graph=True)
        kept = [g for g, name in zip(first, names, strict=True) if name != missing]
        return torch.autograd.grad(sum(g.square().sum() for g in kept), inputs)

    want = step(case.reference)
    with torch_convfix.enabled("cpu"):
        got = step(case.apply)
    assert worst_error(got, want) < 1e-10


def test_only_the_bias_gradient():
    """ggO from ggb alone."""
    x, w, b = (t.requires_grad_() for t in Case((2, 3, 5, 5), (4, 3, 3, 3), True).inputs())
    g = torch.rand(2, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    with torch_convfix.enabled("cpu"):
        (gb,) = torch.autograd.grad(conv_forward(x, w, b), b, g, create_graph=True)
        (gg,) = torch.autograd.grad(gb.square().sum(), g)
    want = (2 * g.sum((0, 2, 3))).reshape(1, 4, 1, 1).expand_as(g)
    torch.testing.assert_close(gg, want)
