"""Groups merged into block-diagonal ones: the same numbers, where it is picked, and what it costs."""

import math
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from statistics import fmean

import hypothesis
import pytest
import torch
from device import on_xla
from hypothesis import strategies as st
from support import Case, derivatives, worst_error
from torch.nn import functional as F

import torch_convfix
from torch_convfix import _C
from torch_convfix.tpu.torch_xla import trace


@pytest.fixture
def merge():
    """Enable merging, of as many groups as asked for; what was before is there again after."""

    def enable(factor: int = 0) -> None:
        options = _C.Options(
            _C.OutputPadding.native, _C.Hardware.tpu, True, _C.Grouped.merge, factor
        )
        _C.enable("xla", options)

    before = _C.enabled_options("xla")
    yield enable
    _C.enable("xla", before)


@st.composite
def grouped_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A grouped case of any kind, and a factor that divides its groups."""
    groups = draw(st.sampled_from([2, 4, 6]))
    merge = draw(st.sampled_from([k for k in range(2, groups + 1) if groups % k == 0]))
    dim, transposed = draw(st.integers(1, 3)), draw(st.booleans())

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dim))

    kernel, stride, dilation = each(1, 3), each(1, 2), each(1, 2)
    spatial = each(5, 7)
    first, second = groups * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels = first if transposed else groups * second
    output_padding = tuple(
        draw(st.integers(0, max(s, d) - 1)) if transposed else 0
        for s, d in zip(stride, dilation, strict=True)
    )
    return (
        Case(
            (2, channels, *spatial),
            (first, second, *kernel),
            False,
            stride,
            each(0, 1),
            dilation,
            groups,
            transposed,
            output_padding,
        ),
        merge,
    )


def test_same_numbers_to_second_order(merge, case_share):
    @hypothesis.settings(max_examples=int(24 * case_share) + 2)
    @hypothesis.given(grouped_cases())
    def check(drawn):
        case, factor = drawn
        merge(factor)
        want = derivatives(case.reference, case.inputs(), 2)
        got = on_xla(lambda *t: derivatives(case.apply, t, 2), *case.inputs())
        assert worst_error(got, want) < 1e-10

    check()


def test_special_values_cross_the_groups_of_a_merge(merge):
    """What makes it opt-in: 4 groups of 2 channels, merged by 2, a NaN in channel 0 of x or g."""
    x, w = torch.ones(1, 8, 5, 5), torch.ones(8, 2, 3, 3)
    nan = x.clone()
    nan[0, 0, 2, 2] = float("nan")

    def all_three(x, w, g):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = F.conv2d(x, w, padding=1, groups=4)
        return [y.detach(), *torch.autograd.grad(y, [x, w], g)]

    def reached():
        of_x = on_xla(all_three, nan, w, x)
        of_g = on_xla(all_three, x, w, nan)
        kinds = of_x[0][0], of_g[1][0], of_x[2], of_g[2]  # F, I, and W by x and by g
        return [t.isnan().flatten(1).any(1).nonzero().flatten().tolist() for t in kinds]

    with torch_convfix.enabled("xla", hardware="tpu"):
        assert reached()[:2] == [[0, 1], [0, 1]]
    merge(2)
    assert reached()[:2] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    merge(4)
    assert reached()[:2] == [list(range(8))] * 2
    assert reached()[2:] == [[0, 1], [0]]  # W only leaves out what it computed too much


def feature_groups(channels: int, groups: int, size: int) -> list[int]:
    """Of the forward and the input gradient, in what the planner makes of a layer."""
    x = torch.zeros(32, channels, size, size, requires_grad=True)
    w = torch.zeros(channels, channels // groups, 3, 3, requires_grad=True)

    def step(x, w):
        y = F.conv2d(x, w, padding=1, groups=groups)
        return [y, *torch.autograd.grad(torch.tanh(y).sum(), [x, w])]

    counts = re.findall(r"feature_group_count = (\d+)", trace(step, [x, w]))
    return sorted(map(int, counts), reverse=True)[:2]


def load_fit_planner():
    path = Path(__file__).parents[2] / "scripts/fit_planner"
    loader = SourceFileLoader("fit_planner", str(path))
    module = module_from_spec(spec_from_loader("fit_planner", loader))
    sys.modules["fit_planner"] = module  # its dataclasses look for it there
    loader.exec_module(module)
    return module


def test_never_dearer_than_direct_and_leaner_in_the_mean():
    """The planner on every layer that the compiler's estimates are known of, by those estimates."""
    fit_planner = load_fit_planner()
    ratios = []
    with torch_convfix.enabled("xla", hardware="tpu", grouped="merge"):
        for (layer, op, _), of in fit_planner.read().items():
            call, sizes = fit_planner.operation(layer, op)
            # Sizes alone matter: every input is one number, expanded on the device.
            text = trace(
                lambda *a, call=call, sizes=sizes: [call(*map(torch.Tensor.expand, a, sizes))],
                [torch.zeros(1, 1, 1, 1)] * 2,
            )
            counts = re.findall(r"(?:feature|batch)_group_count = (\d+)", text)
            merge = layer.groups // max(map(int, counts))
            if merge > 1 and {1, merge} <= of.keys():
                ratios.append(of[merge] / of[1])
    assert len(ratios) > 100
    assert max(ratios) <= 1.05
    assert fmean(map(math.log2, ratios)) < -1


def test_planned_where_it_helps():
    with torch_convfix.enabled("xla", hardware="tpu", grouped="merge"):
        assert feature_groups(128, 32, 56) == [1, 1]
        assert feature_groups(384, 384, 14) == [384, 384]  # depthwise: never cheaper
        assert feature_groups(64, 1, 14) == [1, 1]
    with torch_convfix.enabled("xla", hardware="cpu", grouped="merge"):
        assert feature_groups(128, 32, 56)[0] == 32  # XLA:CPU has no matrix unit to fill


def test_opt_in(monkeypatch):
    monkeypatch.delenv("TORCH_CONVFIX_GROUPED", raising=False)
    with torch_convfix.enabled("xla", hardware="tpu"):
        assert feature_groups(128, 32, 56) == [32, 32]
    monkeypatch.setenv("TORCH_CONVFIX_GROUPED", "merge")
    with torch_convfix.enabled("xla", hardware="tpu"):
        assert feature_groups(128, 32, 56) == [1, 1]
        with torch_convfix.enabled("xla", hardware="tpu", grouped="direct"):
            assert feature_groups(128, 32, 56) == [32, 32]
        assert feature_groups(128, 32, 56) == [1, 1]
    with pytest.raises(ValueError, match="grouped must be one of direct, merge, got 'all'"):
        torch_convfix.enable("xla", grouped="all")


@pytest.mark.slow
def test_the_environment_on_import():
    code = "import torch_convfix as t; print(t.status().options['xla']['grouped'])"
    environment = {"TORCH_CONVFIX_GROUPED": "merge", "PJRT_DEVICE": "CPU"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == ["merge"]
