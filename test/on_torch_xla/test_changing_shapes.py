"""The loop of examples/clip_and_interpolate.py in all its variations, every step against the CPU."""

import copy

import clip_and_interpolate as loop
import pytest
import torch
import torch_xla
from device import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F
from torch_xla.debug import metrics

import torch_convfix

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", loop.VARIATIONS)
def test_every_step_as_on_the_cpu(name):
    variation = loop.VARIATIONS[name]
    want = loop.flat(list(loop.train(variation, CPU, torch.float64)))
    steps = list(loop.train(variation, DEVICE))
    torch_xla.sync()
    got = [t.cpu() for t in loop.flat(steps)]
    assert loop.worst_deviation(got, want) < 1e-5


def live_tensors() -> int:
    return metrics.counter_value("CreateXlaTensor") - metrics.counter_value("DestroyXlaTensor")


@pytest.mark.slow
def test_a_hundred_steps_of_changing_batch_sizes():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(loop.BATCHES), (100,), generator=generator).tolist()
    variation = loop.Variation([(loop.BATCHES[i], 3, 8, 8) for i in drawn])
    on_device = loop.train(variation, DEVICE)
    alive, compiled = [], []
    for want in loop.train(variation, CPU, torch.float64):
        got = [t.cpu() for t in loop.flat([next(on_device)])]
        assert loop.worst_deviation(got, loop.flat([want])) < 1e-4
        clipped = torch.cat([g.flatten() for g in want[1]]).norm()
        assert clipped < 1.001 * loop.MAX_NORM
        del got
        alive.append(live_tensors())
        compiled.append(torch_convfix.status().compilation.graphs)
    assert len(alive) == 100
    assert max(alive[20:]) <= max(alive[:20])
    assert compiled[20] == compiled[-1]  # every size has been there


def bucket(x: Tensor, target: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """As docs/dynamic-shapes.md has it."""
    size = next(b for b in sizes if b >= len(x))
    weight = torch.zeros(size)
    weight[: len(x)] = 1 / len(x)
    pad = size - len(x)
    x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, pad))
    return x, F.pad(target, (0, pad)), weight


def test_buckets_bound_the_number_of_graphs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 11 * 11, 5))
    reference = copy.deepcopy(model)
    model = model.to(DEVICE)
    torch_xla.sync()
    before = torch_convfix.status().compilation.graphs
    for number in (3, 5, 8, 2, 7, 4, 1, 6):
        images, target = torch.randn(number, 3, 13, 13), torch.randint(5, (number,))
        want = torch.autograd.grad(
            F.cross_entropy(reference(images), target), list(reference.parameters())
        )
        x, t, weight = (v.to(DEVICE) for v in bucket(images, target, (4, 8)))
        loss = (F.cross_entropy(model(x), t, reduction="none") * weight).sum()
        got = torch.autograd.grad(loss, list(model.parameters()))
        torch_xla.sync()
        assert loop.worst_deviation([g.cpu() for g in got], want) < 1e-5
    assert torch_convfix.status().compilation.graphs == before + 2


def test_status_tells_what_was_compiled():
    def convolve(size):
        x, w = torch.ones(size, device=DEVICE), torch.ones(3, 3, 2, 2, device=DEVICE)
        y = F.conv2d(x, w)
        torch_xla.sync()
        assert (y.cpu() == 12).all()
        return torch_convfix.status().compilation

    torch_xla.sync()
    before = torch_convfix.status().compilation
    size = (1, 3, 37, 41)  # of no other test
    first = convolve(size)
    assert first.graphs == before.graphs + 1
    assert first.seconds > before.seconds
    assert first.shapes[size] == before.shapes.get(size, 0) + 1
    again = convolve(size)
    assert again.graphs == first.graphs
    assert again.reused == first.reused + 1
    assert again.shapes[size] == first.shapes[size] + 1
    assert convolve((1, 3, 38, 41)).graphs == again.graphs + 1
    assert f"{again.graphs + 1} graphs compiled" in str(torch_convfix.status())
