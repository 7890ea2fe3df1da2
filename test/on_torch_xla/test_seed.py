"""The bug that began this: a transposed convolution with output padding inside a double backward."""

import itertools

import pytest
import torch
from device import DEVICE, on_xla
from expecttest import assert_expected_inline
from support import Case, derivatives, worst_error

import torch_convfix

MODES = ["native", "pad"]
HARDWARE = ["cpu", "tpu"]


def test_the_error_without_padding():
    """torch_xla's own input-gradient kernel, told the size of the result, on an unpadded input."""
    x = torch.rand(3, 20, 3, 3, device=DEVICE)
    w = torch.rand(20, 32, 16, 16, device=DEVICE)
    like = torch.empty(3, 32, 32, 32, device=DEVICE)
    with torch_convfix.disabled("xla"), pytest.raises(RuntimeError) as error:
        torch.ops.aten.convolution_backward_overrideable(
            x, like, w, [1, 1], [1, 1], [2, 2], False, [0, 0], 1, [True, False, False]
        )[0].cpu()
    message = next(line for line in str(error.value).splitlines() if "out_backprop" in line)
    assert_expected_inline(
        message[message.index("Size of") :],
        """Size of out_backprop doesn't match computed: actual = 3, computed = 4 spatial_dim: 2 input: 32 filter: 16 output: 3 stride: 1 dilation: 2""",
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("kernel", [3, 4])
def test_gradient_penalty(kernel, mode, hardware):
    case = Case((32, 3, 32, 32), (20, 3, kernel, kernel), True, (2, 2), (1, 1))

    def penalty(apply, x, w, b):
        x = x.detach().requires_grad_()
        w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
        critic = torch.tanh(apply(x, w, b)).mean((1, 2, 3))
        (gradient,) = torch.autograd.grad(critic.sum(), x, create_graph=True)
        loss = ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()
        return [loss, *torch.autograd.grad(loss, [x, w, b])]

    want = penalty(case.reference, *case.inputs())
    with torch_convfix.enabled("xla", output_padding=mode, hardware=hardware):
        got = on_xla(lambda *t: penalty(case.apply, *t), *case.inputs(torch.float32))
    assert worst_error(got, want) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_the_transposed_convolution_of_the_thread(mode):
    """Input [3, 20, 3, 3], kernel [20, 32, 16, 16] and one row and column of output padding."""
    case = Case((3, 20, 3, 3), (20, 32, 16, 16), False, (1, 1), (1, 1), (2, 2), 1, True, (1, 1))
    want = derivatives(case.reference, case.inputs(), 1)
    assert want[0].shape == (3, 32, 32, 32)
    with torch_convfix.enabled("xla", output_padding=mode):
        got = on_xla(lambda *t: derivatives(case.apply, t, 1), *case.inputs(torch.float32))
    assert worst_error(got, want) < 1e-4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_output_padding(dim, groups, mode):
    """All of them in one graph: it is the compiling that takes time."""
    cases = [
        Case(
            (2, 2 * groups, *(3,) * dim),
            (2 * groups, 3, *(2,) * dim),
            True,
            (s,) * dim,
            (1,) * dim,
            (d,) * dim,
            groups,
            True,
            (output_padding,) * dim,
        )
        for s, d in itertools.product([1, 2, 3], [1, 2, 4])
        for output_padding in range(max(s, d))
    ]
    inputs = [case.inputs() for case in cases]

    def run(function, *tensors):
        tensors = iter(tensors)
        results = []
        for case, own in zip(cases, inputs, strict=True):
            own = [next(tensors) for _ in own]
            results += derivatives(getattr(case, function), own, 2)
        return results

    flat = [t for own in inputs for t in own]
    want = run("reference", *flat)
    with torch_convfix.enabled("xla", output_padding=mode):
        got = on_xla(lambda *t: run("apply", *t), *flat)
    assert worst_error(got, want) < 1e-10
