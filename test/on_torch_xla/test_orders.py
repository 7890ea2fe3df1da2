"""Convolutions on XLA against the written-out formula in float64, at orders 0 to 3."""

import pytest
import torch
from device import on_xla
from support import Case, cases, check_many, derivatives, worst_error

import torch_convfix


def error(case: Case, order: int, dtype: torch.dtype = torch.float64) -> float:
    want = derivatives(case.reference, case.inputs(), order)
    got = on_xla(lambda *t: derivatives(case.apply, t, order), *case.inputs(dtype))
    return worst_error(got, want)


# Apart, so that the workers share them: 510 cases in all.
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_float64_to_third_order(case_share, dim, transposed):
    def check(case):
        assert error(case, 3) < 1e-10

    check_many(check, cases(dim=dim, transposed=transposed), 85 * case_share)


def test_float32(case_share):
    def check(case):
        want = derivatives(case.reference, case.inputs(), 3)
        got = on_xla(lambda *t: derivatives(case.apply, t, 3), *case.inputs(torch.float32))
        third = len(case.inputs())
        assert worst_error(got[:-third], want[:-third]) < 1e-4
        assert worst_error(got[-third:], want[-third:]) < 1e-3

    check_many(check, cases(), 60 * case_share)


@pytest.mark.parametrize("hardware", ["cpu", "tpu"])
def test_padding_by_us(case_share, hardware):
    def check(case):
        assert error(case, 2) < 1e-10

    transposed = cases().filter(lambda case: case.transposed)
    with torch_convfix.enabled("xla", output_padding="pad", hardware=hardware):
        check_many(check, transposed, 40 * case_share)


# Large enough for the planner's lowerings on XLA:CPU: depthwise as taps, grouped W feature-grouped.
LOWERED = {
    "depthwise": Case((4, 64, 16, 16), (64, 1, 3, 3), True, (1, 1), (1, 1), (1, 1), 64),
    "multiplier": Case((4, 32, 12, 13), (96, 1, 3, 5), True, (1, 1), (1, 2), (1, 1), 32),
    "strided": Case((8, 64, 17, 16), (64, 1, 3, 3), False, (2, 2), (1, 1), (1, 1), 64),
    "kernel under stride": Case((16, 64, 20, 20), (64, 1, 2, 2), False, (3, 3), (0, 0), (1, 1), 64),
    "dilated": Case((8, 64, 20, 19), (64, 1, 3, 3), False, (2, 3), (3, 2), (2, 3), 64),
    "1-d": Case((16, 64, 70), (64, 1, 5), True, (2,), (2,), (1,), 64),
    "3-d": Case((8, 32, 7, 7, 8), (32, 1, 3, 3, 3), False, (1, 2, 1), (1,) * 3, (1,) * 3, 32),
    "7 x 7": Case((4, 64, 14, 14), (64, 1, 7, 7), False, (1, 1), (3, 3), (1, 1), 64),
    "transposed": Case(
        (8, 64, 9, 9), (64, 1, 3, 3), True, (2, 2), (1, 1), (1, 1), 64, True, (1, 1)
    ),
    "transposed, more output padding than stride": Case(
        (4, 64, 9, 9), (64, 2, 3, 3), True, (1, 2), (1, 1), (3, 3), 64, True, (2, 2)
    ),
    "grouped": Case((2, 12, 9, 9), (8, 3, 3, 3), True, (2, 2), (1, 1), (1, 1), 4),
    "grouped transposed": Case(
        (2, 12, 5, 5), (12, 2, 3, 3), True, (2, 2), (1, 1), (2, 2), 4, True, (1, 1)
    ),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name):
    assert error(LOWERED[name], 2) < 1e-10


@pytest.mark.parametrize("name", ["depthwise", "strided", "transposed", "grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    case = LOWERED[name]
    inputs = case.inputs(dtype)
    want = derivatives(case.reference, [t.double() for t in inputs], 1)
    got = on_xla(lambda *t: derivatives(case.apply, t, 1), *inputs)
    assert all(t.dtype == dtype for t in got)
    assert worst_error(got, want) < 20 * torch.finfo(dtype).eps


def test_autocast():
    case = LOWERED["strided"]
    x, w = case.inputs(torch.float32)
    want = derivatives(case.reference, [x.double(), w.double()], 2)

    def run(x, w):
        def layer(x, w):
            with torch.autocast("xla", dtype=torch.bfloat16):
                return case.apply(x, w)

        return derivatives(layer, [x, w], 2)

    got = on_xla(run, x, w)
    assert got[0].dtype == torch.bfloat16
    assert got[1].dtype == got[3].dtype == torch.float32
    assert worst_error(got, want) < 0.05


def test_composed(case_share):
    def check(case):
        assert error(case, 3) < 1e-10

    with torch_convfix.enabled("xla", convolution="composed"):
        check_many(check, cases(), 60 * case_share)
