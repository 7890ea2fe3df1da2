"""The shape functions of the two overrideable operators."""

import pytest
import torch
from support import cases, check_many
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_convfix

overrideable = torch.ops.aten.convolution_overrideable
backward = torch.ops.aten.convolution_backward_overrideable


@pytest.fixture(autouse=True)
def enabled():
    with torch_convfix.enabled("cpu"):
        yield


def parameters(case):
    return (
        case.stride,
        case.padding,
        case.dilation,
        case.transposed,
        case.output_padding,
        case.groups,
    )


explicit = cases(batched=True).filter(lambda case: not isinstance(case.padding, str))


@pytest.mark.parametrize("fake", [False, True])
def test_shapes_are_those_of_the_convolution(case_share, fake):
    def check(case):
        x, w, *b = case.inputs()
        want = case.apply(x, w, *b)
        with FakeTensorMode() if fake else torch.device("meta"):
            x, w = (torch.empty(t.shape, dtype=t.dtype) for t in (x, w))
            y = overrideable(x, w, None, *parameters(case))
            assert (y.shape, y.dtype) == (want.shape, want.dtype)
            gradients = backward(y, x, w, *parameters(case), [True] * 3)
        assert [g.shape for g in gradients] == [x.shape, w.shape, want.shape[1:2]]

    check_many(check, explicit, 100 * case_share)


def test_mask():
    x, w = torch.empty(2, 4, 5, 5, device="meta"), torch.empty(4, 4, 3, 3, device="meta")
    y = torch.empty(2, 4, 3, 3, device="meta")
    one = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    gx, gw, gb = backward(y, x, w, *one, [False, True, False])
    assert gx is None
    assert gb is None
    assert gw.shape == w.shape


def test_bad_input_is_refused():
    x, w = torch.empty(2, 5, 5, 5, device="meta"), torch.empty(4, 4, 3, 3, device="meta")
    with pytest.raises(RuntimeError, match="input must have 4 channels"):
        overrideable(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
