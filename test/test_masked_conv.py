"""Masked weights are never read: exactness, derivatives, cuts, drop-in behaviour."""

import contextlib
import copy
import functools
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_convfix.masked.application import masked_conv, masked_conv_transpose
from torch_convfix.masked.cover import _boxes, cover
from torch_convfix.nn import (
    MaskedConv1d,
    MaskedConv2d,
    MaskedConv3d,
    MaskedConvTranspose2d,
    causal_mask,
    causal_mask_1d,
    checkerboard_mask,
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


@st.composite
def geometries(draw):
    """A layer of ours in float64, an input for it, and the torch function of the same geometry."""
    transposed = draw(st.booleans())
    n = 2 if transposed else draw(st.integers(1, 3))
    per_axis = lambda *values: tuple(draw(st.sampled_from(values)) for _ in range(n))  # noqa: E731
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    ins, outs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    kernel, stride, dilation = per_axis(1, 2, 3, 4), per_axis(1, 2, 3), per_axis(1, 2)
    settings = dict(groups=groups, bias=draw(st.booleans()), dilation=dilation)
    if transposed:
        shape = (ins, outs // groups, *kernel)
        settings["padding"] = per_axis(0, 1, 2)
        settings["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
    else:
        shape = (outs, ins // groups, *kernel)
        settings["padding_mode"] = draw(
            st.sampled_from(("zeros", "zeros", "reflect", "replicate", "circular"))
        )
        settings["padding"] = draw(st.sampled_from((per_axis(0, 1, 2), "same", "valid")))
        if settings["padding"] == "same":
            stride = (1,) * n
    least = [
        5 if transposed else max(3, d * (k - 1) + 1) for k, d in zip(kernel, dilation, strict=True)
    ]
    size = tuple(s + draw(st.integers(0, 3)) for s in least)
    kind = draw(
        st.sampled_from((kernel, shape, (shape[0], *[1] * (n + 1)), (*shape[:2], *[1] * n)))
    )
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(kind, generator=generator) < draw(st.sampled_from((0.0, 0.3, 0.6, 1.0)))
    layer = (
        MaskedConvTranspose2d if transposed else (MaskedConv1d, MaskedConv2d, MaskedConv3d)[n - 1]
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some masks have no structure; they must be right as well
        ours = layer(
            ins,
            outs,
            kernel,
            stride,
            mask=mask,
            algorithm=draw(st.sampled_from(ALGORITHMS)),
            dtype=torch.float64,
            **settings,
        )
    return ours, torch.randn(2, ins, *size, dtype=torch.float64)


def usual_forward(layer, weight, x):
    """The torch.nn layer of the same geometry, applied with `weight`."""
    plain = copy.copy(layer)
    plain.__class__ = next(c for c in type(layer).__mro__ if c.__module__ == nn.Conv2d.__module__)
    return torch.func.functional_call(plain, {"weight": weight}, (x,))


@settings(max_examples=120, deadline=None)
@given(geometries())
def test_equals_the_multiplied_mask_at_orders_0_1_2(case):
    layer, x = case
    x.requires_grad_()

    def derivatives(forward):
        variables = [x, *layer.parameters()]
        y = forward(x)
        first = torch.autograd.grad(y.sin().sum(), variables, create_graph=True)
        penalty = sum(g.sin().sum() for g in first)
        second = torch.autograd.grad(penalty, variables, materialize_grads=True)
        return [y, *first, *second]

    ours = derivatives(layer)
    usual = derivatives(lambda x: usual_forward(layer, layer.weight * layer.mask, x))
    for a, b in zip(ours, usual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    masked = ~layer.mask.broadcast_to(layer.weight.shape)
    for gradient in (ours[2], ours[-2] if layer.bias is not None else ours[-1]):
        assert (gradient[masked] == 0).all()


@settings(max_examples=60, deadline=None)
@given(geometries())
def test_cover_holds_each_kept_weight_once_and_no_other(case):
    layer, _ = case
    if not layer.exact:
        return
    groups, outs, ins = layer._cover.channels
    count = torch.zeros(groups, outs, ins, *layer.kernel_size, dtype=torch.int)
    for block in layer._cover.blocks:
        for box in block.boxes:
            index = itertools.product(block.groups, block.outs, block.ins, *box)
            count[tuple(torch.tensor(list(index)).T)] += 1
    count = count.transpose(1, 2) if layer.transposed else count
    assert torch.equal(count.flatten(0, 1), layer.mask.broadcast_to(layer.weight.shape).int())


def test_cover_of_every_3x3_mask_has_the_fewest_boxes():
    runs = [range(a, b, s) for a in range(3) for b in range(a + 1, 4) for s in (1, 2)]
    boxes = {sum(1 << 3 * r + c for r in rows for c in cs) for rows in runs for cs in runs}
    fewest = [0] * 512
    for kept in range(1, 512):
        fewest[kept] = 1 + min(fewest[kept ^ box] for box in boxes if box & kept == box)
    assert [len(_boxes(kept, (3, 3))) for kept in range(512)] == fewest


@pytest.mark.parametrize(
    ("mask", "convolutions"),
    [(causal_mask(k, kind), 2) for k in (3, 5, 7, 11) for kind in "AB"]
    + [(checkerboard_mask(k), 2) for k in (3, 5, 7)]
    + [(causal_mask_1d(9), 1), (causal_mask((3, 3, 3)), 3)]
    + [(causal_mask(3, "A", (6, 6)), 4), (causal_mask(3, "B", (6, 6)), 5)],
)
def test_cuts_of_the_ready_masks(mask, convolutions):
    shape = torch.broadcast_shapes(mask.shape, (6, 6, *mask.shape[2:]))
    plan = cover(mask, torch.Size(shape), 1)
    assert plan.exact and plan.convolutions == convolutions


def test_ready_masks():
    assert causal_mask(3, "A")[0, 0].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert causal_mask((2, 3), "B")[0, 0].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert causal_mask_1d(5, "A")[0, 0].tolist() == [1, 1, 0, 0, 0]
    assert checkerboard_mask(3)[0, 0].tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    centres = {kind: causal_mask(3, kind, (3, 6))[:, ::2, 1, 1].tolist() for kind in "AB"}
    assert centres["A"] == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    assert centres["B"] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="kind: got 'C'"):
        causal_mask(3, "C")
    with pytest.raises(ValueError, match=r"channels: got \(4, 3\)"):
        causal_mask(3, channels=(4, 3))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_colour_groups_do_not_see_later_colours(algorithm):
    layer = MaskedConv2d(6, 6, 3, padding=1, mask=causal_mask(3, "B", (6, 6)), algorithm=algorithm)
    x = torch.randn(1, 6, 5, 5)
    poisoned = x.clone()
    poisoned[:, 4:, 2, 2] = torch.nan  # blue, at the pixel itself
    clean, y = layer(x)[0, :, 2, 2], layer(poisoned)[0, :, 2, 2]
    assert torch.equal(y[:4], clean[:4]) and y[4:].isnan().all()


def test_mask_without_structure_warns_once_and_still_leaves_dead_taps_unread():
    torch.manual_seed(0)
    mask = torch.rand(16, 16, 3, 3) < 0.5
    mask[:, :, 2] = False
    with pytest.warns(UserWarning, match="without structure") as caught:
        layer = MaskedConv2d(16, 16, 3, padding=1, mask=mask)
        x = torch.randn(1, 16, 5, 5)
        poisoned = x.clone()
        poisoned[:, :, 3:] = torch.nan
        assert torch.equal(layer(poisoned)[:, :, :3], layer(x)[:, :, :3])
        with torch.no_grad():
            layer.weight[~mask] = torch.nan
        assert layer(x).isfinite().all()
    assert len(caught) == 1 and not layer.exact
    assert caught[0].filename == __file__


def test_drop_in_for_the_torch_layer():
    plain, mask = nn.Conv2d(4, 6, 3, padding=1), causal_mask(3)
    layer = MaskedConv2d(4, 6, 3, padding=1, mask=mask)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    layer.load_state_dict(plain.state_dict())
    usual = Multiplied(4, 6, 3, padding=1, mask=mask)
    layer.load_state_dict(usual.state_dict())
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(layer(x), usual(x))
    torch.testing.assert_close(layer(x[0]), usual(x[0]))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x)) and twin.exact
    assert layer.double()(x.double()).dtype == torch.float64
    assert "exact=True" in repr(layer)
    other = Multiplied(4, 6, 3, padding=1, mask=causal_mask(3, "A"))
    with pytest.raises(RuntimeError, match="mask: differs from the mask"):
        layer.load_state_dict(other.state_dict())


def test_transposed_output_size():
    layer = MaskedConvTranspose2d(2, 3, 3, stride=2, padding=1, mask=LOWEST_ROW)
    x = torch.randn(1, 2, 4, 4)
    y = usual_forward(layer, layer.weight * LOWEST_ROW, x)
    torch.testing.assert_close(layer(x), y)
    assert layer(x, output_size=[8, 7]).shape == (1, 3, 8, 7)


def test_functional_is_the_layer():
    x, w, b = torch.randn(1, 4, 5, 5), torch.randn(6, 4, 3, 3), torch.randn(6)
    y = masked_conv(x, w, LOWEST_ROW, b, padding=1)
    torch.testing.assert_close(y, F.conv2d(x, w * LOWEST_ROW, b, padding=1))
    y = masked_conv_transpose(x, w.transpose(0, 1), LOWEST_ROW, b, stride=2, output_padding=1)
    expected = F.conv_transpose2d(x, w.transpose(0, 1) * LOWEST_ROW, b, 2, output_padding=1)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_torch_compile_traces_one_graph(algorithm):
    mask = causal_mask(3, "B", (6, 6))
    layer = MaskedConv2d(6, 6, 3, padding=1, mask=mask, algorithm=algorithm)
    x = torch.randn(2, 6, 5, 5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).square().sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    layer(x).square().sum().backward()
    torch.testing.assert_close(gradient, layer.weight.grad)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_torch_func_transforms(algorithm):
    layer = MaskedConv2d(2, 3, 3, padding=1, mask=causal_mask(3), algorithm=algorithm).double()
    parameters = dict(layer.named_parameters())
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).sin().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    expected = [torch.func.grad(loss)(parameters, one) for one in x]
    for name, value in per_sample.items():
        torch.testing.assert_close(value, torch.stack([e[name] for e in expected]))
    tangent = torch.randn_like(x)
    forward = torch.func.jvp(functools.partial(loss, parameters), (x,), (tangent,))[1]
    reverse = (torch.func.grad(loss, argnums=1)(parameters, x) * tangent).sum()
    torch.testing.assert_close(forward, reverse)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MaskedConv2d(2, 2, 3, mask=torch.ones(4, 4)), r"mask: got shape \(4, 4\)"),
        (lambda: MaskedConv2d(2, 2, 3, mask=torch.full((3, 3), 0.5)), "values other than 0 and 1"),
        (lambda: MaskedConv2d(2, 2, 3, mask=LOWEST_ROW.to("meta")), "mask: got a meta tensor"),
        (lambda: MaskedConv2d(2, 2, 3, mask=LOWEST_ROW, algorithm="fft"), "algorithm: got 'fft'"),
        (
            lambda: MaskedConv2d(2, 2, 3, mask=LOWEST_ROW)(torch.ones(1, 3, 5, 5)),
            "input: got shape",
        ),
        (
            lambda: MaskedConv2d(2, 2, 3, mask=LOWEST_ROW)(torch.ones(1, 2, 2, 2)),
            "leaves no output",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message), contextlib.nullcontext():
        call()
