"""torch.func, torch.compile, gradcheck, memory formats and threads, on XLA through our kernels."""

import threading

import pytest
import torch
from device import DEVICE, on_xla
from support import Case, derivatives, worst_error
from torch.func import grad, hessian, jacrev, jvp, vmap

import torch_convfix
from torch_convfix.functional import conv_forward

PLAIN = Case((2, 4, 6, 6), (6, 2, 3, 3), False, (2, 2), (1, 1), (1, 1), 2)
DEPTHWISE = Case((2, 4, 6, 5), (8, 1, 3, 2), False, (1, 2), (1, 0), (2, 1), 4)
TRANSPOSED = Case((2, 4, 4, 4), (4, 3, 3, 3), False, (2, 2), (1, 1), (1, 1), 2, True, (1, 1))
LARGE = Case((16, 32, 9, 9), (32, 1, 3, 3), False, (2, 2), (1, 1), (1, 1), 32)  # as taps
CASES = {"plain": PLAIN, "depthwise": DEPTHWISE, "transposed": TRANSPOSED, "taps": LARGE}


def loss(convolve, x, w):
    return torch.tanh(convolve(x, w)).square().sum()


def penalty(convolve, x, w):
    gradients = grad(lambda *t: loss(convolve, *t), argnums=(0, 1))(x, w)
    return sum(g.square().sum() for g in gradients)


def tangents(inputs):
    return tuple(torch.ones_like(t) / (i + 2) for i, t in enumerate(inputs))


def stacked(t):
    return torch.stack([t, t * 0.5, -t])


TRANSFORMS = {
    "vmap over grad": lambda f, x, w: vmap(grad(lambda *t: loss(f, *t), argnums=(0, 1)))(
        stacked(x), stacked(w)
    ),
    "vmap over grad, one weight": lambda f, x, w: vmap(
        grad(lambda *t: loss(f, *t), argnums=(0, 1)), in_dims=(0, None)
    )(stacked(x), w),
    "vmap over grad of grad": lambda f, x, w: vmap(grad(lambda *t: penalty(f, *t), argnums=(0, 1)))(
        stacked(x), stacked(w)
    ),
    "grad over vmap over grad": lambda f, x, w: grad(
        lambda x, w: vmap(lambda *t: penalty(f, *t), in_dims=(0, None))(stacked(x), w).sum(),
        argnums=(0, 1),
    )(x, w),
    "jvp of grad": lambda f, x, w: jvp(
        grad(lambda *t: loss(f, *t), argnums=(0, 1)), (x, w), tangents((x, w))
    )[1],
    "jacrev": lambda f, x, w: (jacrev(lambda w: f(x, w).sum((0, 2, 3)))(w),),
    "hessian": lambda f, x, w: (hessian(lambda w: loss(f, x, w))(w),),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["plain", "depthwise", "transposed"])
def test_func(name, transform):
    case = CASES[name]
    want = TRANSFORMS[transform](case.reference, *case.inputs())
    got = on_xla(lambda x, w: TRANSFORMS[transform](case.apply, x, w), *case.inputs())
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_compile(name):
    case = CASES[name]
    want = derivatives(case.reference, case.inputs(), 1)

    layer = {
        "stride": case.stride,
        "padding": case.padding,
        "groups": case.groups,
        "dilation": case.dilation,
        "transposed": case.transposed,
        "output_padding": case.output_padding,
    }

    def run(x, w):
        compiled = torch.compile(
            lambda x, w: conv_forward(x, w, **layer), backend="openxla", fullgraph=True
        )
        return derivatives(compiled, [x, w], 1)

    assert worst_error(on_xla(run, *case.inputs()), want) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_channels_last(name):
    case = CASES[name]
    want = derivatives(case.reference, case.inputs(), 2)
    inputs = [t.to(memory_format=torch.channels_last) for t in case.inputs()]
    got = on_xla(lambda *t: derivatives(case.apply, t, 2), *inputs)
    assert worst_error(got, want) < 1e-10


GRADCHECKED = [
    Case((1, 2, 5), (3, 2, 2), True, (1,), (1,), (1,)),
    Case((1, 2, 5), (4, 1, 2), True, (2,), (0,), (1,), 2),
    Case((1, 2, 3), (2, 1, 3), True, (2,), (1,), (1,), 2, True, (1,)),
    Case((1, 2, 4, 4), (2, 2, 3, 3), True, (1, 1), (1, 1), (1, 1)),
    Case((1, 2, 5, 4), (2, 2, 3, 2), True, (2, 1), (1, 0), (1, 2)),
    Case((2, 2, 4, 4), (2, 1, 3, 3), True, (2, 2), (1, 1), (1, 1), 2),
    Case((1, 2, 4, 4), (4, 1, 2, 2), False, (1, 1), (0, 0), (2, 2), 2),
    Case((1, 2, 2, 2), (2, 2, 3, 3), True, (2, 2), (1, 1), (1, 1), 1, True, (1, 1)),
    Case((1, 2, 2, 2), (2, 1, 2, 2), False, (1, 1), (1, 1), (3, 3), 2, True, (2, 1)),
    Case((2, 4, 4), (2, 1, 3, 3), True, (1, 1), (1, 1), (1, 1), 2),
    Case((1, 2, 3, 3, 2), (2, 1, 2, 2, 2), True, (1,) * 3, (0,) * 3, (1,) * 3, 2),
    Case((1, 2, 2, 2, 2), (2, 1, 2, 2, 2), True, (2,) * 3, (0,) * 3, (1,) * 3, 2, True, (1, 0, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRADCHECKED)
def test_gradcheck_and_gradgradcheck(case):
    inputs = [t.to(DEVICE).requires_grad_() for t in case.inputs()]
    assert torch.autograd.gradcheck(case.apply, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(case.apply, inputs, fast_mode=True)


def test_two_threads():
    """Both differentiate at once, while the main thread enables and disables another device."""
    case, failures = PLAIN, []
    want = derivatives(case.reference, case.inputs(), 2)

    def work():
        try:
            for _ in range(3):
                got = [t.cpu() for t in derivatives(case.apply, on_device, 2)]
                if worst_error(got, want) > 1e-10:
                    failures.append(got)
        except Exception as error:  # a thread's exception would be lost
            failures.append(error)

    on_device = [t.to(DEVICE) for t in case.inputs()]
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        torch_convfix.enable("cpu")
        torch_convfix.disable("cpu")
    for thread in threads:
        thread.join()
    assert not failures


def test_enable_disable_enable():
    case = LARGE
    want = derivatives(case.reference, case.inputs(), 2)
    for _ in range(2):
        for context in (torch_convfix.disabled, torch_convfix.enabled):
            with context("xla"):
                got = on_xla(lambda *t: derivatives(case.apply, t, 2), *case.inputs())
            assert worst_error(got, want) < 1e-10
