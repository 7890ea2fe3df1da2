"""torch.utils.checkpoint and ours on TorchTPU, at second order; ours is behind a barrier."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from checkpointed import derivatives, inputs, plain
from placeholders import on_tpu
from support import worst_error
from torch import Tensor
from torch.utils import checkpoint

import torch_convfix
from torch_convfix.tpu.torch_tpu import trace

APPLY = {
    "PyTorch's": partial(checkpoint.checkpoint, use_reentrant=False),
    "ours": torch_convfix.checkpoint,
}


def step(apply, x: Tensor, w: Tensor) -> Sequence[Tensor]:
    return derivatives(apply, 2, x, w)


@pytest.mark.parametrize("name", APPLY)
def test_second_order(name):
    got = on_tpu(partial(step, APPLY[name]), *inputs(torch.float32))
    assert worst_error(got, step(plain, *inputs(torch.float64))) < 1e-4


def test_the_recomputation_is_behind_a_barrier():
    text = trace(partial(step, APPLY["ours"]), inputs(torch.float32))
    assert "optimization_barrier" in text
