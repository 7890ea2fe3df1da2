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
from test_masked_leaks import ALGORITHMS, LOWEST_ROW, Multiplied
from torch import nn

from torch_convfix.masked.application import masked_conv, masked_conv_transpose
from torch_convfix.nn import (
    MaskedConv1d,
    MaskedConv2d,
    MaskedConv3d,
    MaskedConvTranspose2d,
    causal_mask,
)


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
