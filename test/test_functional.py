"""conv_forward, conv_input_grad, conv_weight_grad: the three derivatives of one form."""

import pytest
import torch
from support import cases, check_many, stock_can, worst_error

import torch_convfix
from torch_convfix.functional import conv_forward, conv_input_grad, conv_weight_grad


def form(case):
    """x, w, a random g, and the three functions of the case, taking (x, w), (g, w) and (x, g)."""
    x, w = case.inputs()[:2]
    layer = {
        "stride": case.stride,
        "padding": case.padding,
        "dilation": case.dilation,
        "groups": case.groups,
        "transposed": case.transposed,
        "output_padding": case.output_padding,
    }
    y = conv_forward(x, w, **layer)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return (
        (x, w, g),
        lambda x, w: conv_forward(x, w, **layer),
        lambda g, w: conv_input_grad(g, w, x.shape, **layer),
        lambda x, g: conv_weight_grad(x, g, w.shape, **layer),
    )


explicit = cases().filter(lambda case: not isinstance(case.padding, str))


@pytest.mark.parametrize("device", ["stock", "ours"])
def test_partial_derivatives(case_share, device):
    """Each against autograd of the written-out formula, and each one's own gradients in turn."""

    def check(case):
        (x, w, g), f, i, k = form(case)
        x, w, g = (t.requires_grad_() for t in (x, w, g))
        y = case.reference(x, w)
        gx, gw = torch.autograd.grad(y, [x, w], g, create_graph=True)
        assert worst_error([f(x, w), i(g, w), k(x, g)], [y, gx, gw]) < 1e-10
        cotangents = [torch.cos(t.detach()) for t in (y, gx, gw)]
        want = torch.autograd.grad([y, gx, gw], [x, w, g], cotangents)
        got = torch.autograd.grad([f(x, w), i(g, w), k(x, g)], [x, w, g], cotangents)
        assert worst_error(got, want) < 1e-10

    ours = device == "ours"
    drawn = explicit if ours else explicit.filter(stock_can)
    with (torch_convfix.enabled if ours else torch_convfix.disabled)("cpu"):
        check_many(check, drawn, 100 * case_share)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradgradcheck(transposed):
    layer = {"stride": 2, "padding": 1, "groups": 2, "transposed": transposed}
    x = torch.rand(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    w = torch.rand(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)
    g = torch.rand_like(conv_forward(x, w, **layer)).requires_grad_()
    with torch_convfix.enabled("cpu"):
        for fn, inputs in (
            (lambda g, w: conv_input_grad(g, w, x.shape, **layer), (g, w)),
            (lambda x, g: conv_weight_grad(x, g, w.shape, **layer), (x, g)),
        ):
            assert torch.autograd.gradcheck(fn, inputs)
            assert torch.autograd.gradgradcheck(fn, inputs)


def test_vmap_and_forward_mode():
    x, w = torch.rand(2, 4, 6, 6), torch.rand(4, 2, 3, 3)
    g = torch.rand(3, 2, 4, 4, 4)
    batched = torch.func.vmap(lambda g: conv_input_grad(g, w, x.shape, groups=2))(g)
    torch.testing.assert_close(
        batched, torch.stack([conv_input_grad(t, w, x.shape, groups=2) for t in g])
    )
    _, tangent = torch.func.jvp(
        lambda g: conv_weight_grad(x, g, w.shape, groups=2), (g[0],), (g[1],)
    )
    torch.testing.assert_close(tangent, conv_weight_grad(x, g[1], w.shape, groups=2))


def test_wrong_sizes_are_named():
    x, w = torch.rand(2, 4, 6, 6), torch.rand(4, 4, 3, 3)
    with pytest.raises(RuntimeError, match=r"grad_output must have shape \[2, 4, 4, 4\]"):
        conv_weight_grad(x, torch.rand(2, 4, 5, 4), w.shape)
    with pytest.raises(RuntimeError, match=r"grad_output must have shape \[2, 4, 5, 5\]"):
        conv_input_grad(torch.rand(2, 4, 4, 4), w, (2, 4, 7, 7))
    with pytest.raises(RuntimeError, match="one dtype"):
        conv_weight_grad(x.double(), torch.rand(2, 4, 4, 4), w.shape)
    with pytest.raises(RuntimeError, match="stride must have 1 or 2 entries"):
        conv_input_grad(torch.rand(2, 4, 4, 4), w, x.shape, stride=(1, 1, 1))
