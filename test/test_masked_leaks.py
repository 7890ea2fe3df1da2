"""No masked value reaches an output or a gradient, by kernels that mix taps as fast ones do."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_convfix.nn import (
    MaskedConv2d,
    causal_mask,
)
from torch_convfix.reference import winograd_conv2d

LOWEST_ROW = torch.tensor([[1, 1, 1], [1, 1, 1], [0, 0, 0]])
SIZES = (1, 128, 5, 5)  # those of the thread: 128 channels, 5x5 image, 3x3 kernel
ALGORITHMS = ("direct", "im2col")


class Multiplied(nn.Conv2d):
    """The usual masked layer."""

    def __init__(self, *args, mask, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", mask)

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * self.mask, bias)


class Nnpack(torch.autograd.Function):
    """PyTorch's NNPACK kernel, forward and for the input gradient."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch._nnpack_spatial_convolution(x, w, None, 1)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        flipped = w.transpose(0, 1).flip(2, 3).contiguous()
        grad_x = torch._nnpack_spatial_convolution(g.contiguous(), flipped, None, 1)
        return grad_x, nn.grad.conv2d_weight(x, w.shape, g, padding=1)


class Backend(TorchFunctionMode):
    """Runs convolutions of stride 1 as a fast kernel: the 3x3 ones, as libraries do, or all."""

    def __init__(self, kernel, every_size=False):
        super().__init__()
        self.kernel, self.every_size, self.calls = kernel, every_size, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.conv2d and (self.every_size or args[1].shape[2:] == (3, 3)):
            x, w, bias, stride, padding, dilation, groups = args
            assert (*stride, *dilation, groups) == (1,) * 5
            self.calls += 1
            y = self.kernel(x, w, padding=padding)
            return y if bias is None else y + bias.view(-1, 1, 1)
        return func(*args, **(kwargs or {}))


LEAKY = {f"winograd {tile}": functools.partial(winograd_conv2d, tile=tile) for tile in (2, 4, 6)}
if torch._nnpack_available():
    LEAKY["nnpack"] = lambda x, w, padding: Nnpack.apply(x, w)


def layers(mask=LOWEST_ROW, channels=128, **kwargs):
    """The same weights multiplied and cut."""
    torch.manual_seed(0)
    ours = MaskedConv2d(channels, channels, mask.shape[-1], padding="same", mask=mask, **kwargs)
    usual = Multiplied(channels, channels, mask.shape[-1], padding=1, mask=mask)
    usual.load_state_dict({**ours.state_dict(), "mask": mask})
    return usual, ours


def leak(layer, change=1.0, run=lambda fn, *inputs: fn(*inputs)):
    """The thread's two experiments: (gradient outside the field, change of unmasked outputs)."""
    torch.manual_seed(1)
    unseen = torch.ones(5, 5, dtype=torch.bool)
    unseen[1:4, 1:4] = layer.mask.view(3, 3) == 0
    x = torch.randn(SIZES)
    changed = torch.cat([x[:, :, :3], x[:, :, 3:] + change], 2)

    def experiments(x, changed):
        x.requires_grad_()
        own = copy.deepcopy(layer).to(x.device)
        (gradient,) = torch.autograd.grad(own(x)[..., 2, 2].sum(), x)
        return gradient, (own(changed) - own(x))[:, :, 2]  # row 2 sees rows 1 and 2

    gradient, difference = run(experiments, x, changed)
    return gradient[..., unseen].abs().max().item(), difference.abs().max().item()


@pytest.mark.parametrize("name", LEAKY)
def test_multiplied_mask_leaks_where_taps_are_mixed_and_the_cut_kernel_does_not(name):
    usual, ours = layers()
    with Backend(LEAKY[name]) as backend:
        leaked = leak(usual)
        assert backend.calls == 3
        assert min(leaked) > 1e-8, leaked
        assert leak(ours) == (0.0, 0.0)


@pytest.mark.parametrize("mask", [LOWEST_ROW, causal_mask(3, "A"), causal_mask(3, "B")])
def test_cut_kernels_do_not_leak_as_winograd_kernels_of_tile_2(mask):
    # With two outputs a tile, the one input that an output must not see meets it nowhere.
    usual, ours = layers(mask)
    with Backend(LEAKY["winograd 2"], every_size=True) as backend:
        assert min(leak(usual)) > 1e-8
        calls = backend.calls
        assert leak(ours) == (0.0, 0.0)
        assert backend.calls - calls == 3 * ours._cover.convolutions


@pytest.mark.parametrize("name", ["winograd 4", "winograd 6"])
def test_im2col_does_not_leak_where_cut_kernels_of_larger_tiles_do(name):
    with Backend(LEAKY[name], every_size=True):
        assert max(leak(layers()[1])) > 1e-8
        assert leak(layers(algorithm="im2col")[1]) == (0.0, 0.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_leak_on_cpu(algorithm):
    assert leak(layers(algorithm=algorithm)[1], change=1e6) == (0.0, 0.0)


def test_auto_avoids_nnpack():
    ours = layers()[1]
    x = torch.randn(16, *SIZES[1:])  # NNPACK is taken from batch 16 on
    changed = x.clone()
    changed[:, :, 3:] += 1
    with torch.backends.mkldnn.flags(enabled=False), torch.no_grad():
        assert torch.equal(ours(changed)[:, :, :3], ours(x)[:, :, :3])
        im2col = copy.deepcopy(ours)
        im2col.algorithm = "im2col"
        assert torch.equal(ours(x), im2col(x))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_values_change_not_one_bit(algorithm, poison):
    _, ours = layers(algorithm=algorithm, channels=16)
    x = torch.randn(2, 16, 5, 5)
    clean = ours(x)[:, :, :3]
    with torch.no_grad():
        ours.weight[:, :, 2] = poison  # masked weights count as little as masked inputs
    poisoned = x.clone()
    poisoned[:, :, 3:] = poison
    assert torch.equal(ours(poisoned)[:, :, :3], clean)

    # Inputs that no output reads: the last row, without padding. No gradient sees them either.
    valid = MaskedConv2d(16, 4, 3, mask=LOWEST_ROW, algorithm=algorithm)

    def derivatives(x):
        x = x.clone().requires_grad_()
        y = valid(x)
        first = torch.autograd.grad(y.tanh().sum(), [x, *valid.parameters()], create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        return [y, *first, *torch.autograd.grad(penalty, [x, *valid.parameters()])]

    unread = x.clone()
    unread[:, :, 4:] = poison
    assert all(torch.equal(a, b) for a, b in zip(derivatives(unread), derivatives(x), strict=True))


@pytest.mark.parametrize("name", [n for n in LEAKY if n != "nnpack"])
def test_weight_gradient_of_the_first_of_two_layers_is_free_of_the_leak(name):
    torch.manual_seed(0)
    x = torch.randn(1, 64, 8, 8)
    changed = x.clone()
    changed[:, :, 3:] = 1e6  # output row 2 sees rows 0 to 2

    def change(first, second):
        def gradient(x):
            centre = second(first(x).tanh())[:, :, 2, 3].square().sum()
            return torch.autograd.grad(centre, first.weight)[0]

        return (gradient(changed) - gradient(x)).abs().max().item()

    pairs = [layers(channels=64) for _ in range(2)]
    with Backend(LEAKY[name]):
        assert change(*(usual for usual, _ in pairs)) > 1e-8
        assert change(*(ours for _, ours in pairs)) == 0.0
