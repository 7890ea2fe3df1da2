"""Receptive fields against the analytic ones, and the leak of a real kernel."""

import itertools

import pytest
import torch
from torch import nn

from torch_convfix.masked.receptive_field import leaks, plot_receptive_field, receptive_field
from torch_convfix.nn import MaskedConv2d, causal_mask

METHODS = ("gradient", "nan", "perturb")


def analytic(modules, size, output):
    """The inputs that output position `output` of a 1-d stack sees, by index arithmetic alone."""
    sizes = [size]
    for m in modules:
        k, s, p, d = m.kernel_size[0], m.stride[0], m.padding[0], m.dilation[0]
        if isinstance(m, nn.ConvTranspose1d):
            sizes.append((sizes[-1] - 1) * s - 2 * p + d * (k - 1) + m.output_padding[0] + 1)
        else:
            sizes.append((sizes[-1] + 2 * p - d * (k - 1) - 1) // s + 1)
    seen = {output}
    for m, size in zip(reversed(modules), sizes[-2::-1], strict=True):
        k, s, p, d = m.kernel_size[0], m.stride[0], m.padding[0], m.dilation[0]
        pairs = itertools.product(seen, range(k))
        if isinstance(m, nn.ConvTranspose1d):
            reached = {(o + p - d * t) / s for o, t in pairs}
        else:
            reached = {o * s - p + d * t for o, t in pairs}
        seen = {int(i) for i in reached if i == int(i) and 0 <= i < size}
    return sorted(seen)


STACKS = {
    "stride": [nn.Conv1d(1, 1, 3, stride=2, padding=1), nn.Conv1d(1, 1, 3, padding=1)],
    "dilation": [nn.Conv1d(1, 1, 2, dilation=d) for d in (1, 2, 4)],
    "holes": [nn.Conv1d(1, 1, 2, stride=3, padding=1), nn.Conv1d(1, 1, 3, dilation=2, padding=2)],
    "transposed": [
        nn.ConvTranspose1d(1, 1, 4, stride=2, padding=1),
        nn.Conv1d(1, 1, 3, padding=1),
    ],
    "hourglass": [
        nn.Conv1d(1, 1, 3, stride=2),
        nn.ConvTranspose1d(1, 1, 2, stride=3, dilation=2, output_padding=1),
    ],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STACKS)
def test_field_of_a_stack_is_the_analytic_one(name, method):
    torch.manual_seed(0)
    modules = STACKS[name]
    for m in modules:
        nn.init.uniform_(m.weight, 0.5, 1)  # no weight that happens to vanish
    net = nn.Sequential(*modules).double()
    x = torch.randn(1, 1, 14, dtype=torch.float64)
    for output in range(net(x).shape[-1]):
        field = receptive_field(net, x, (0, 0, output), method)
        assert field.flatten().nonzero().flatten().tolist() == analytic(modules, 14, output)


def test_strength_of_a_linear_function_is_its_weights():
    weight = torch.tensor([[1.0, 0.0, -2.0], [0.0, 3.0, -1.0]])
    x = torch.ones(3)
    for method in ("gradient", "perturb"):
        field = receptive_field(lambda x: weight @ x, x, slice(None), method, magnitude=2.0)
        assert field.tolist() == [1, 3, 2]
        assert receptive_field(lambda x: weight @ x, x, 0, method).tolist() == [1, 0, 2]
    assert receptive_field(lambda x: weight @ x, x, 1, "nan").tolist() == [1, 1, 1]  # 0 * NaN
    assert receptive_field(lambda x: torch.ones(2), x, 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("method", METHODS)
def test_causal_net_sees_the_past_only(method):
    torch.manual_seed(0)
    net = nn.Sequential(
        MaskedConv2d(1, 4, 5, padding=2, mask=causal_mask(5, "A")),
        nn.Tanh(),
        MaskedConv2d(4, 1, 3, padding=1, mask=causal_mask(3, "B")),
    )
    x = torch.randn(1, 1, 6, 6)
    past = (torch.arange(36) < 3 * 6 + 2).view(6, 6)
    assert leaks(net, x, (0, 0, 3, 2), past, method) == []
    assert receptive_field(net, x, (0, 0, 3, 2), method)[0, 0, 3, 1] > 0


@pytest.mark.skipif(not torch._nnpack_available(), reason="this torch was built without NNPACK")
def test_leaks_names_the_leak_of_nnpack(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(32, 32, 3, 3)
    weight[:, :, 2] = 0  # the lowest row is masked
    allowed = torch.zeros(5, 5, dtype=torch.bool)
    allowed[1:3, 1:4] = True

    def fn(x):
        return torch._nnpack_spatial_convolution(x, weight, None, 1)

    def ours(x):
        return layer(x)

    layer = MaskedConv2d(32, 32, 3, padding=1, bias=False, mask=weight[:1, :1] != 0)
    layer.weight.data.copy_(weight)
    x, centre = torch.randn(1, 32, 5, 5), (0, slice(None), 2, 2)
    found = leaks(fn, x, centre, allowed, "perturb", magnitude=100.0)
    rows = {index[2] for index, _ in found}
    assert {3, 4} & rows and not any(allowed[index[2:]] for index, _ in found)
    assert 1e-8 < found[0][1] < 1e-4 and found == sorted(found, key=lambda leak: -leak[1])
    assert leaks(fn, x, centre, allowed, "nan")
    for method in METHODS:
        assert leaks(ours, x, centre, allowed, method, magnitude=100.0) == []

    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "field.png"
    field = plot_receptive_field(fn, x, centre, path, allowed, "perturb", 100.0)
    assert path.read_bytes().startswith(b"\x89PNG") and field.shape == x.shape


def test_errors_name_the_argument():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="method: got 'fft'"):
        receptive_field(torch.sin, x, 0, "fft")
    with pytest.raises(ValueError, match=r"input: got dtype torch\.int64"):
        receptive_field(torch.sin, torch.ones(3, dtype=torch.long), 0)
    with pytest.raises(ValueError, match="has a NaN already"):
        receptive_field(torch.sin, x * torch.nan, 0, "nan")
    with pytest.raises(ValueError, match=r"allowed must broadcast to the input, \[3\], got \[2\]"):
        leaks(torch.sin, x, 0, allowed=torch.ones(2, dtype=torch.bool))
