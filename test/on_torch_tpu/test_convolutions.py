"""Convolutions on TorchTPU: the graph's size, and numbers against float64."""

import pytest
import torch
from placeholders import on_tpu
from support import Case, cases, check_many, derivatives, penalty_step, worst_error

import torch_convfix
from torch_convfix.tpu.torch_tpu import trace

HALF = {"stride": 2, "padding": 1}


@pytest.mark.parametrize(("groups", "weight", "stock"), [(96, 1, 104), (32, 4, 40)])
def test_penalty_step_is_nine_convolutions(groups, weight, stock):
    channels = groups * weight
    inputs = [
        torch.zeros(32, channels, 56, 56, requires_grad=True),
        torch.zeros(channels, weight, 3, 3, requires_grad=True),
    ]

    def convolutions():
        text = trace(penalty_step({**HALF, "groups": groups}), inputs)
        return text.count("stablehlo.convolution")

    with torch_convfix.disabled("tpu"):
        assert convolutions() == stock
    with torch_convfix.enabled("tpu"):
        assert convolutions() == 9


@pytest.mark.parametrize("name", ["seed_gp", "tr_gp"])
def test_penalty_step(name):
    transposed = {"transposed": True, "output_padding": 1}
    layer, x, w = {
        "seed_gp": (HALF, (32, 3, 32, 32), (20, 3, 3, 3)),
        "tr_gp": ({**HALF, **transposed}, (32, 128, 28, 28), (128, 64, 3, 3)),
    }[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(x, generator=generator, requires_grad=True)
    w = (torch.randn(w, generator=generator) / w[0] ** 0.5).requires_grad_()
    step = penalty_step(layer)
    want = step(*(t.detach().double().requires_grad_() for t in (x, w)))
    assert worst_error(on_tpu(step, x, w), want) < 1e-4


def test_orders_1_and_2(case_share):
    def check(case: Case):
        want = derivatives(case.reference, case.inputs(), 2)
        inputs = [t.requires_grad_() for t in case.inputs(torch.float32)]
        got = on_tpu(lambda *t: derivatives(case.apply, t, 2), *inputs)
        assert worst_error(got, want) < 1e-4

    drawn = cases().filter(lambda case: 0 not in case.input_size)
    check_many(check, drawn, 60 * case_share)
