"""Bad input raises at the call, naming the argument, and leaves the process and device usable."""

import re

import pytest
import torch
from device import DEVICE, on_xla
from torch.nn import functional as F

import torch_convfix

ONE = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, ...


def xla(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device=DEVICE)


def overrideable(x, w, bias=None, **changes):
    names = ["stride", "padding", "dilation", "transposed", "output_padding", "groups"]
    arguments = dict(zip(names, ONE, strict=True)) | changes
    return torch.ops.aten.convolution_overrideable(x, w, bias, *arguments.values())


def backward(g, x, w, *parameters):
    return torch.ops.aten.convolution_backward_overrideable(
        g, x, w, *(parameters or ONE), [True] * 3
    )


X, W = (2, 4, 8, 8), (6, 4, 3, 3)
BAD = {
    "mixed dtypes": (
        lambda: F.conv2d(xla(*X), xla(*W, dtype=torch.bfloat16)),
        "weight.*Float.*BFloat16|input of Float and weight of BFloat16",
    ),
    "output padding": (
        lambda: F.conv_transpose2d(xla(*X), xla(4, 6, 3, 3), stride=2, output_padding=2),
        r"output_padding must be smaller than either stride or dilation.*\[2, 2\]",
    ),
    "no output channels": (
        lambda: F.conv_transpose2d(xla(2, 3, 8, 8), xla(3, 0, 3, 3)),
        r"weight must have at least one channel.*\[3, 0, 3, 3\]",
    ),
    "two devices": (
        lambda: F.conv2d(xla(*X), torch.ones(W)),
        "input on xla:0 and weight on cpu",
    ),
    "bias on another device": (
        lambda: F.conv2d(xla(*X), xla(*W), torch.ones(6)),
        "bias on cpu and input on xla:0",
    ),
    "channels": (
        lambda: overrideable(xla(*X), xla(6, 5, 3, 3)),
        r"input must have 5 channels.*\[2, 4, 8, 8\]",
    ),
    "grad_output's size": (
        lambda: backward(xla(2, 6, 6, 5), xla(*X), xla(*W)),
        r"grad_output must have shape \[2, 6, 6, 6\].*got \[2, 6, 6, 5\]",
    ),
    "grad_output's rank": (
        lambda: backward(xla(2, 6, 6), xla(*X), xla(*W)),
        r"grad_output must have shape \[2, 6, 6, 6\].*got \[2, 6, 6\]",
    ),
    "stride 0": (lambda: F.conv2d(xla(*X), xla(*W), stride=0), "stride"),
    "padding -1": (lambda: F.conv2d(xla(*X), xla(*W), padding=-1), "padding"),
    "dilation 0": (lambda: F.conv2d(xla(*X), xla(*W), dilation=0), "dilation"),
    "groups 0": (lambda: F.conv2d(xla(*X), xla(*W), groups=0), "groups"),
    "groups not dividing": (
        lambda: F.conv2d(xla(2, 16, 8, 8), xla(*W), groups=4),
        "groups=4, expected weight to be divisible by 4 at dimension 0",
    ),
    "stride 0, direct": (
        lambda: overrideable(xla(*X), xla(*W), stride=[0, 1]),
        r"stride must be at least 1, got \[0, 1\]",
    ),
    "padding -1, direct": (
        lambda: overrideable(xla(*X), xla(*W), padding=[-1, 0]),
        r"padding must be at least 0, got \[-1, 0\]",
    ),
    "dilation 0, direct": (
        lambda: overrideable(xla(*X), xla(*W), dilation=[0, 1]),
        r"dilation must be at least 1, got \[0, 1\]",
    ),
    "output padding -1, direct": (
        lambda: overrideable(xla(*X), xla(4, 6, 3, 3), transposed=True, output_padding=[-1, 0]),
        r"output_padding must be at least 0, got \[-1, 0\]",
    ),
    "groups 0, direct": (
        lambda: overrideable(xla(*X), xla(*W), groups=0),
        "groups must be at least 1, got 0",
    ),
    "groups not dividing, direct": (
        lambda: overrideable(xla(2, 16, 8, 8), xla(*W), groups=4),
        "weight's dimension 0 must be divisible by groups, got groups 4",
    ),
    "too many strides, direct": (
        lambda: overrideable(xla(*X), xla(*W), stride=[1, 1, 1]),
        "stride must have 1 or 2 entries",
    ),
    "kernel too large": (lambda: F.conv2d(xla(2, 4, 2, 2), xla(*W)), "[Kk]ernel size"),
    "kernel too large, direct": (
        lambda: overrideable(xla(2, 4, 2, 2), xla(*W)),
        "kernel size must not exceed the padded input size",
    ),
    "bias's length": (lambda: F.conv2d(xla(*X), xla(*W), xla(5)), "bias"),
    "bias's rank": (lambda: F.conv2d(xla(*X), xla(*W), xla(6, 1)), "bias"),
    "bias's length, direct": (
        lambda: overrideable(xla(*X), xla(*W), xla(5)),
        r"bias must have shape \[6\].*got \[5\]",
    ),
    "four spatial dimensions": (
        lambda: overrideable(xla(2, 4, 8, 8, 8, 8), xla(6, 4, 3, 3, 3, 3)),
        "weight must have 3 to 5 dimensions",
    ),
    "input without dimensions": (lambda: F.conv2d(xla(), xla(*W)), "3D|4D|dimension"),
    "input without dimensions, direct": (
        lambda: overrideable(xla(), xla(*W)),
        "input must have weight's number of dimensions, 4",
    ),
    "weight's rank": (lambda: F.conv2d(xla(*X), xla(6, 4, 3)), "weight|dimension"),
    "weight's rank, direct": (
        lambda: overrideable(xla(*X), xla(6, 4, 3)),
        "stride must have 1 or 1 entries for weight's 1 spatial dimensions",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("mode", ["native", "pad"])
def test_raises_and_the_next_call_is_right(name, mode):
    call, message = BAD[name]
    with torch_convfix.enabled("xla", output_padding=mode):
        with pytest.raises(RuntimeError) as error:
            call()
        assert re.search(message, str(error.value)), str(error.value)
        (sum_of_ones,) = on_xla(lambda x, w: [F.conv2d(x, w)], torch.ones(X), torch.ones(W))
        assert (sum_of_ones == 36).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("hardware", ["cpu", "tpu"])
def test_empty_batch(groups, transposed, hardware):
    function = F.conv_transpose2d if transposed else F.conv2d

    def run(x, w, b):
        x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
        y = function(x, w, b, stride=2, padding=1, groups=groups)
        first = torch.autograd.grad(y.square().sum(), [x, w, b], create_graph=True)
        loss = sum(g.square().sum() for g in first)
        return [y, *first, *torch.autograd.grad(loss, [x, w, b])]

    inputs = [torch.ones(0, 4, 8, 8), torch.ones(4, 4 // groups, 3, 3), torch.ones(4)]
    want = run(*inputs)
    with torch_convfix.enabled("xla", hardware=hardware):
        got = on_xla(run, *inputs)
    assert [t.shape for t in got] == [t.shape for t in want]
    assert all((g == w).all() for g, w in zip(got, want, strict=True))
