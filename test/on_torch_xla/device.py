"""Run something on the XLA device, as tests must: all results in one sync."""

from collections.abc import Callable, Sequence
from typing import Any

import torch_xla
from torch import Tensor

DEVICE = torch_xla.device()


def on_xla(fn: Callable[..., Sequence[Tensor]], *inputs: Any) -> list[Tensor]:
    """CPU copies of ``fn(*inputs)``, with every tensor of ``inputs`` on the XLA device.

    One sync with all results alive: materialized one by one, torch_xla 2.9.0 can return the numbers
    of another graph.
    """
    results = fn(*[t.to(DEVICE) if isinstance(t, Tensor) else t for t in inputs])
    torch_xla.sync()
    return [t.detach().cpu() for t in results]
