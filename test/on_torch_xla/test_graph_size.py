"""How many convolutions a step has, planned for a TPU, and what XLA:CPU is spared."""

import re

import pytest
import torch
from device import DEVICE, on_xla
from support import penalty_step

import torch_convfix
from torch_convfix.functional import conv_weight_grad
from torch_convfix.tpu.torch_xla import trace

HALF = {"stride": 2, "padding": 1}
STEPS = {  # name: layer, x, weight
    "seed_gp": (HALF, (32, 3, 32, 32), (20, 3, 3, 3)),
    "r50_gp": (HALF, (32, 128, 56, 56), (128, 128, 3, 3)),
    "dw_gp": ({**HALF, "groups": 96}, (32, 96, 56, 56), (96, 1, 3, 3)),
    "gr_gp": ({**HALF, "groups": 32}, (32, 128, 56, 56), (128, 4, 3, 3)),
    "tr_gp": (
        {**HALF, "transposed": True, "output_padding": 1},
        (32, 128, 28, 28),
        (128, 64, 3, 3),
    ),
}


def convolutions(stablehlo: str) -> int:
    return stablehlo.count("stablehlo.convolution")


@pytest.mark.parametrize("name", STEPS)
def test_penalty_step_is_nine_convolutions(name):
    layer, x, w = STEPS[name]
    inputs = [torch.zeros(x, requires_grad=True), torch.zeros(w, requires_grad=True)]
    with torch_convfix.enabled("xla", hardware="tpu"):
        assert convolutions(trace(penalty_step(layer), inputs)) == 9


@pytest.mark.parametrize(("name", "stock"), [("dw_gp", 104), ("gr_gp", 40)])
def test_stock_loops_over_groups(name, stock):
    layer, x, w = STEPS[name]
    inputs = [torch.zeros(x, requires_grad=True), torch.zeros(w, requires_grad=True)]
    with torch_convfix.disabled("xla"):
        assert convolutions(trace(penalty_step(layer), inputs)) == stock


def test_mobilenet_v2_with_r1_penalty():
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=10).to(DEVICE)
    parameters = dict(model.named_parameters())
    names = list(parameters)

    def step(image, *values):
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), image)
        (gradient,) = torch.autograd.grad(logits.sum(), image, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), values, allow_unused=True)

    inputs = [torch.zeros(32, 3, 224, 224, requires_grad=True)]
    inputs += [p.detach().cpu().requires_grad_() for p in parameters.values()]
    with torch_convfix.enabled("xla", hardware="tpu"):
        assert convolutions(trace(step, inputs)) <= 311


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("size", [4, 16])
def test_no_batch_group_count_on_xla_cpu(groups, size):
    layer = {**HALF, "groups": groups}

    def weight_grad(x, g):
        return [conv_weight_grad(x, g, (8, 8 // groups, 3, 3), **layer)]

    inputs = [torch.zeros(32, 8, size, size), torch.zeros(32, 8, size // 2, size // 2)]
    # As XLA prints it, a batch_group_count of 1 is the default of a plain convolution.
    pattern = r"batch_group_count = (\d+)"
    with torch_convfix.disabled("xla"):
        assert set(re.findall(pattern, trace(weight_grad, inputs))) == {str(groups)}
    with torch_convfix.enabled("xla", hardware="cpu"):
        assert set(re.findall(pattern, trace(weight_grad, inputs))) <= {"1"}
    on_xla(weight_grad, *inputs)  # and it runs
