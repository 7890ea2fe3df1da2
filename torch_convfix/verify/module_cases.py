"""Samples of PyTorch's own module database: a module, constructed, and the inputs of its forward."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from torch_convfix.verify.derivatives import Call, all_stages

# Left out of the default list: recurrent nets and transformers, not convolutional ones; and those that
# draw random numbers.
_OTHERS = ("*RNN*", "*GRU*", "*LSTM*", "*Transformer*", "*Attention*", "*Fractional*", "*CTC*", "*Lazy*")  # fmt: skip


@dataclass(frozen=True)
class ModuleCase:
    """One sample of a module of PyTorch's database, by its place there."""

    op: str  # "nn.BatchNorm2d"
    index: int
    training: bool
    numel: int = 0

    def stages(self, highest: int) -> list[str]:
        """What to compare of it: compositions with vmap, which take the most time, of the first."""
        return all_stages(highest, batched=1 if self.index == 0 else 0)

    def call(self, dtype: torch.dtype, *, redraw: bool = False) -> Call:
        """The call to compare, of the parameters, the buffers and the inputs."""
        construct, given = _samples(self.op, dtype, self.training)[self.index]
        torch.manual_seed(0)
        module = _info(self.op).module_cls(*construct.args, **construct.kwargs)
        module.to(dtype).train(self.training)
        parameters = dict(module.named_parameters())
        buffers = dict(module.named_buffers())

        def forward(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any
        ) -> Any:
            state = {**parameters, **buffers}
            outputs = torch.func.functional_call(module, state, tuple(args), kwargs)
            return outputs, [t.detach() for t in buffers.values()]  # as the forward left them

        return Call(forward, (parameters, buffers, list(given.args), given.kwargs))

    def spell(self, dtype: torch.dtype, *, redraw: bool) -> str:
        """The argument of `check` that repeats it."""
        return repr(self)


@functools.lru_cache(maxsize=1)
def _database() -> Sequence[Any]:
    from torch.testing._internal.common_modules import module_db

    return module_db


def _info(op: str) -> Any:
    return next(info for info in _database() if info.name == op)


@functools.lru_cache(maxsize=4)
def _samples(op: str, dtype: torch.dtype, training: bool) -> list[tuple[Any, Any]]:
    info = _info(op)
    torch.manual_seed(0)
    samples = info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    )
    return [(s.constructor_input, s.forward_input) for s in samples if s.forward_input is not None]


def module_cases(
    dtype: torch.dtype, *, all_ops: bool = False, only: str = "*", most: int = 4
) -> Iterator[ModuleCase]:
    """At most ``most`` samples a module; in evaluation too where that differs, or with ``all_ops``."""
    for info in _database():
        other = any(fnmatchcase(info.name, pattern) for pattern in _OTHERS)
        if not fnmatchcase(info.name, only) or (other and not all_ops) or dtype not in info.dtypes:
            continue
        for training in (True, False) if all_ops or info.train_and_eval_differ else (True,):
            try:
                count = len(_samples(info.name, dtype, training))
            except Exception:  # drawn again where the case is run, and told there
                count = 1
            for index in range(min(count, most)):
                yield ModuleCase(info.name, index, training)
