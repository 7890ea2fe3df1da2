"""grid_sample and scaled_dot_product_attention on XLA, at every order and in forward mode."""

import copy

import device  # before any backward on the CPU
import pytest
import torch
import torch_xla
from attention_cases import KINDS as ATTENTIONS
from attention_cases import SelfAttention, formula, penalty, transformer_layer
from grid_sample_cases import KINDS as SAMPLES
from grid_sample_cases import formula as sampling_formula
from grid_sample_cases import sample, tensors
from support import derivatives, worst_error
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def to_xla(t):
    return t.detach().to(device.DEVICE) if isinstance(t, Tensor) else t


def read(tensors: list[Tensor]) -> list[Tensor]:
    torch_xla.sync()  # at once: see the graph-hash fault
    return [t.cpu() for t in tensors]


def on_xla(fn, inputs, order: int) -> list[Tensor]:
    return read(derivatives(fn, [to_xla(t) for t in inputs], order))


@pytest.mark.parametrize(
    "kind", [k for k in SAMPLES if k[1] != "nearest"], ids=lambda k: "-".join(map(str, k))
)
def test_grid_sample(kind):
    dim, *how = kind
    order = 3 if kind == (2, "bilinear", "border", False) else 2
    got = on_xla(sample(*how), tensors(dim), order)
    want = derivatives(sampling_formula(*how), tensors(dim), order)
    assert worst_error(got, want) < 1e-10


def test_grid_sample_gradgradcheck():
    inputs = [to_xla(t).requires_grad_() for t in tensors(2)]
    assert torch.autograd.gradgradcheck(sample("bilinear", "zeros", False), inputs, fast_mode=True)


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attention(kind):
    inputs, kwargs = ATTENTIONS[kind]
    order = 3 if kind == "causal" else 2
    moved = {name: to_xla(value) for name, value in kwargs.items()}
    got = on_xla(lambda *t: F.scaled_dot_product_attention(*t, **moved), inputs, order)
    want = derivatives(lambda *t: formula(*t, **kwargs), inputs, order)
    assert worst_error(got, want) < 1e-10


def test_attention_gradgradcheck():
    inputs = [to_xla(t[:1]).requires_grad_() for t in ATTENTIONS["other lengths"][0]]
    assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, inputs, fast_mode=True)


def transforms(fn, inputs: list[Tensor], argument: int) -> list[Tensor]:
    def loss(*t: Tensor) -> Tensor:
        return torch.tanh(fn(*t)).square().sum()

    everything = tuple(range(len(inputs)))
    grad = torch.func.grad(loss, everything)
    tangents = tuple(t.cos() for t in inputs)
    one = [t[:1] for t in inputs]
    return [
        torch.func.jvp(fn, tuple(inputs), tangents)[1],
        *torch.func.jvp(grad, tuple(inputs), tangents)[1],
        torch.func.hessian(loss, argument)(*one),
        *torch.func.vmap(grad)(*(t[:, None] for t in inputs)),
    ]


def test_transforms_of_grid_sample():
    how = ("bilinear", "border", False)
    got = read(transforms(sample(*how), [to_xla(t) for t in tensors(2)], 1))
    want = transforms(sampling_formula(*how), list(tensors(2)), 1)
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize("kind", ["causal", "bool mask"])
def test_transforms_of_attention(kind):
    inputs, kwargs = ATTENTIONS[kind]
    moved = {name: to_xla(value) for name, value in kwargs.items()}
    attention = F.scaled_dot_product_attention
    got = read(transforms(lambda *t: attention(*t, **moved), [to_xla(t) for t in inputs], 0))
    want = transforms(lambda *t: formula(*t, **kwargs), inputs, 0)
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize("make", [SelfAttention, transformer_layer])
@pytest.mark.parametrize("train", [True, False])
def test_layers(make, train):
    torch.manual_seed(0)
    net = make().double().train(train)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        want = [t for t in penalty(net, x) if t is not None]
    got = penalty(copy.deepcopy(net).to(device.DEVICE), to_xla(x))
    # The transformer layer has a gelu, whose error function on XLA is right to 1e-8 alone.
    assert worst_error(read([t for t in got if t is not None]), want) < 1e-7
