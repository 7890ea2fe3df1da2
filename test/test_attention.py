"""Derivatives of scaled_dot_product_attention on the CPU, of every order and in forward mode."""

import pytest
import torch
from attention_cases import (
    FLOAT_MASK,
    KINDS,
    SelfAttention,
    formula,
    penalty,
    tensors,
    transformer_layer,
)
from support import derivatives, worst_error
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_convfix

attention = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def on_cpu():
    with torch_convfix.enabled("cpu"):
        yield


every_kind = pytest.mark.parametrize("kind", KINDS)


def both(kind: str):
    inputs, kwargs = KINDS[kind]
    return inputs, lambda *t: attention(*t, **kwargs), lambda *t: formula(*t, **kwargs)


def is_fused(output: Tensor) -> bool:
    return "FlashAttentionForCpu" in type(output.grad_fn).__name__


@every_kind
def test_three_orders(kind):
    inputs, ours, written_out = both(kind)
    assert is_fused(ours(*(t.clone().requires_grad_() for t in inputs)))
    got, want = (derivatives(f, inputs, 3) for f in (ours, written_out))
    assert worst_error(got, want) < 1e-10


@every_kind
def test_gradgradcheck(kind):
    inputs, ours, _ = both(kind)
    inputs = [t.clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradgradcheck(ours, inputs, fast_mode=True)


def test_third_order_by_differences():
    def gradient(*inputs: Tensor) -> tuple[Tensor, ...]:
        y = attention(*inputs, is_causal=True)
        return torch.autograd.grad(y.pow(3).sum(), inputs, create_graph=True)

    inputs = [t[:1, :1].clone().requires_grad_() for t in tensors(4, 2, 3)]
    assert torch.autograd.gradgradcheck(gradient, inputs)


@every_kind
def test_first_derivative_is_the_stock_kernels(kind):
    inputs, ours, _ = both(kind)
    inputs = [t.clone().requires_grad_() for t in inputs]
    cotangent = torch.randn_like(ours(*inputs))
    with torch_convfix.disabled("cpu"):
        want = torch.autograd.grad(ours(*inputs), inputs, cotangent)
    for got, stock in zip(torch.autograd.grad(ours(*inputs), inputs, cotangent), want, strict=True):
        assert torch.equal(got, stock)
    graph = torch.autograd.grad(ours(*inputs), inputs, cotangent, create_graph=True)
    for got, stock in zip(graph, want, strict=True):
        torch.testing.assert_close(got, stock, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "kind", ["plain", "other lengths", "causal", "bool mask", "grouped queries"]
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms(kind):
    inputs, ours, written_out = both(kind)
    tangents = tuple(torch.randn_like(t) for t in inputs)

    def results(fn):
        def loss(*t: Tensor) -> Tensor:
            return torch.tanh(fn(*t)).square().sum()

        grad = torch.func.grad(loss, (0, 1, 2))
        one = [t[:1] for t in inputs]
        return [
            torch.func.jvp(fn, tuple(inputs), tangents)[1],
            *torch.func.jvp(grad, tuple(inputs), tangents)[1],
            torch.func.hessian(loss, 1)(*one),
            torch.func.jacfwd(torch.func.jacfwd(loss, 0), 2)(*one),
            *torch.func.vmap(grad)(*(t[:, None] for t in inputs)),
            *torch.func.vmap(grad, (0, None, None))(inputs[0][:, None], *one[1:]),
        ]

    got, want = results(ours), results(written_out)
    assert worst_error(got, want) < 1e-10


def test_a_mask_with_a_tangent():
    inputs = tensors(4, 4, 5)
    got, want = (
        torch.func.jvp(lambda m, f=f: f(*inputs, attn_mask=m), (FLOAT_MASK,), (FLOAT_MASK.sin(),))
        for f in (attention, formula)
    )
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_other_dtypes(dtype, tolerance):
    inputs = tensors(4, dtype=dtype)
    got = derivatives(attention, inputs, 2)
    assert all(t.dtype == dtype for t in got)
    want = derivatives(formula, [t.double() for t in inputs], 2)
    assert worst_error(got, want) < tolerance


def test_empty():
    inputs = [t[:0] for t in tensors(4)]
    assert all(t.numel() == 0 for t in derivatives(attention, inputs, 2))


def test_inputs_written_in_place():
    def written(f):
        def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q * 1
            q[:, 0] = q[:, 1] * 2
            v = F.elu_(v.transpose(1, 2) * 1).transpose(1, 2)
            return f(q, k.mul(1).add_(1), v)

        return fn

    got, want = (derivatives(written(f), tensors(4), 2) for f in (attention, formula))
    assert worst_error(got, want) < 1e-10


_EMPTY = torch.empty(0)
_KERNELS = {  # forward and backward of the other fused operators, without a device that has them
    "cudnn": (
        lambda q, k, v, m: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, m, True)[0],
        lambda g, q, k, v, m: torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, q, _EMPTY, _EMPTY, _EMPTY, m, _EMPTY, _EMPTY, 4, 5, 0.0, False
        ),
    ),
    "overrideable": (
        lambda q, k, v, m: torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
            q, k, v, m
        )[0],
        lambda g, q, k, v, m: (
            torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
                g,
                q,
                k,
                v,
                m,
                [True] * 4,
                q,
                _EMPTY,
                _EMPTY,
                _EMPTY,
                4,
                5,
                0.0,
                False,
                _EMPTY,
                _EMPTY,
            )
        ),
    ),
}


@pytest.mark.parametrize("kernel", _KERNELS)
def test_other_devices_fused_operators(kernel):
    """Our composition alone: nothing here has a kernel for them."""
    forward, backward = _KERNELS[kernel]
    inputs = tensors(4, 4, 5)
    _, tangent = torch.func.jvp(
        lambda *t: forward(*t, FLOAT_MASK), tuple(inputs), tuple(t.cos() for t in inputs)
    )
    _, want = torch.func.jvp(
        lambda *t: formula(*t, FLOAT_MASK), tuple(inputs), tuple(t.cos() for t in inputs)
    )
    assert worst_error([tangent], [want]) < 1e-10

    mask = FLOAT_MASK.clone().requires_grad_()
    leaves = [t.requires_grad_() for t in inputs]
    cotangent = torch.randn_like(want).requires_grad_()
    wanted = [*leaves, mask] if kernel == "overrideable" else leaves
    got = backward(cotangent, *leaves, mask)
    want = torch.autograd.grad(formula(*leaves, mask), wanted, cotangent, create_graph=True)
    assert worst_error([t.detach() for t in got], [t.detach() for t in want]) < 1e-10
    second = [
        torch.autograd.grad(sum(t.square().sum() for t in first), [*wanted, cotangent])
        for first in (got, want)
    ]
    assert worst_error(*second) < 1e-10


def test_dropout_in_a_fused_operator_is_refused():
    q = torch.randn(1, 1, 2, 2, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"scaled_dot_product_attention: .*dropout"):
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            q, q, q, q, q, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY, 2, 2, 0.1, False
        )


def test_dropout_of_0_and_of_the_math_kernel_differentiate_twice():
    q = torch.randn(1, 1, 2, 2, requires_grad=True)
    for p in (0.0, 0.5):
        (g,) = torch.autograd.grad(attention(q, q, q, dropout_p=p).sum(), q, create_graph=True)
        (gg,) = torch.autograd.grad(g.square().sum(), q)
        assert gg.isfinite().all()


@pytest.mark.parametrize("make", [SelfAttention, transformer_layer])
@pytest.mark.parametrize("train", [True, False])
def test_layers(make, train):
    """Against the math kernel, in train and eval."""
    torch.manual_seed(0)
    net = make().double().train(train)
    x = torch.randn(2, 5, 8, dtype=torch.float64)

    def hvp() -> list[Tensor]:
        parameters = {n: p.detach() for n, p in net.named_parameters()}
        tangents = {n: torch.sin(p + 1) for n, p in parameters.items()}

        def loss(p: dict[str, Tensor]) -> Tensor:
            return torch.tanh(torch.func.functional_call(net, p, (x,))).square().sum()

        return list(torch.func.jvp(torch.func.grad(loss), (parameters,), (tangents,))[1].values())

    def results() -> list[Tensor]:
        return [t for t in penalty(net, x) if t is not None] + hvp()

    got = results()
    with sdpa_kernel(SDPBackend.MATH), torch_convfix.disabled("cpu"):
        want = results()
    assert len(got) == len(want) and worst_error(got, want) < 1e-9


def test_the_operator_databases_samples():
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (o for o in op_db if o.name == "nn.functional.scaled_dot_product_attention")
    checked = 0
    for s in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        if s.kwargs.get("dropout_p"):
            continue
        inputs = [s.input, *s.args]
        with torch_convfix.disabled("cpu"), sdpa_kernel(SDPBackend.MATH):
            want = derivatives(lambda *t, s=s: op(*t, **s.kwargs), inputs, 2)
        got = derivatives(lambda *t, s=s: op(*t, **s.kwargs), inputs, 2)
        assert worst_error(got, want) < 1e-9
        checked += 1
    assert checked
