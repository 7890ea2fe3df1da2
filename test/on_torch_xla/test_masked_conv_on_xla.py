"""Masked convolutions on XLA: no leak, the right derivatives, the flops of the kept taps."""

import pytest
import torch
from device import DEVICE, on_xla
from test_masked_leaks import ALGORITHMS, layers, leak
from torch.nn import functional as F

from torch_convfix.masked.application import masked_conv, masked_conv_transpose
from torch_convfix.nn import causal_mask


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_leak(algorithm):
    assert leak(layers(algorithm=algorithm)[1], 1e6, on_xla) == (0.0, 0.0)


def test_masked_values_change_not_one_bit():
    layer = layers(channels=16)[1].to(DEVICE)
    inputs = [torch.randn(2, 16, 5, 5)]
    for poison in (float("nan"), float("inf"), 1e30):
        inputs.append(inputs[0].clone())
        inputs[-1][:, :, 3:] = poison
    clean, *poisoned = on_xla(lambda *xs: [layer(x)[:, :, :3] for x in xs], *inputs)
    assert all(torch.equal(y, clean) for y in poisoned)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_are_those_of_the_multiplied_mask(algorithm, transposed):
    torch.manual_seed(0)
    mask = causal_mask(3, "B", (6, 6))
    x, w = torch.randn(2, 6, 7, 7).double(), torch.randn(6, 6, 3, 3).double()
    cut, usual = masked_conv, F.conv2d
    if transposed:
        cut, usual = masked_conv_transpose, F.conv_transpose2d

    def derivatives(forward):
        def run(*variables):
            variables = [v.detach().requires_grad_() for v in variables]
            loss = forward(*variables).sin().sum()
            first = torch.autograd.grad(loss, variables, create_graph=True)
            penalty = sum(g.sin().sum() for g in first)
            return [*first, *torch.autograd.grad(penalty, variables)]

        return run

    settings = dict(stride=2, padding=1)
    ours = derivatives(lambda x, w: cut(x, w, mask, algorithm=algorithm, **settings))
    expected = derivatives(lambda x, w: usual(x, w * mask, **settings))(x, w)
    for a, b in zip(on_xla(ours, x, w), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def flops(fn, *inputs):
    from torch_convfix.tpu import _jax
    from torch_convfix.tpu.torch_xla import trace

    return _jax.flops(trace(fn, inputs))


@pytest.mark.parametrize("kind", ["A", "B"])
@pytest.mark.parametrize("size", [3, 5, 7])
def test_flops_are_those_of_the_kept_taps(size, kind):
    pytest.importorskip("jax", reason="jax is not installed")
    mask = causal_mask(size, kind)
    x, w = torch.randn(2, 8, 28, 28), torch.randn(16, 8, size, size)
    ours = flops(lambda x, w: [masked_conv(x, w, mask, padding="same")], x, w)
    dense = flops(lambda x, w: [F.conv2d(x, w, padding="same")], x, w)
    assert ours / dense <= mask.sum().item() / mask.numel() * 1.15
