"""Samples of PyTorch's own operator database, and some of ours where it is thin."""

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_convfix.verify.conv_cases import references
from torch_convfix.verify.derivatives import Call, all_stages
from torch_convfix.verify.spelling import Unspellable, redrawn, spell, tensor

_NN = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d alpha_dropout avg_pool1d avg_pool2d avg_pool3d batch_norm bilinear
binary_cross_entropy binary_cross_entropy_with_logits celu channel_shuffle conv1d conv2d conv3d
conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity
cross_entropy dropout dropout2d dropout3d elu embedding feature_alpha_dropout gaussian_nll_loss gelu
glu group_norm hardshrink hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss
instance_norm interpolate kl_div l1_loss layer_norm leaky_relu linear local_response_norm logsigmoid
margin_ranking_loss max_pool1d max_pool2d max_pool3d max_unpool2d mish mse_loss multi_margin_loss
multilabel_margin_loss multilabel_soft_margin_loss nll_loss normalize pad pairwise_distance
pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu relu6 rms_norm rrelu
scaled_dot_product_attention selu silu smooth_l1_loss soft_margin_loss softmin softplus softshrink
softsign tanhshrink threshold triplet_margin_loss unfold upsample_bilinear upsample_nearest
"""
_TORCH = """
abs add addbmm addmm addmv amax amin baddbmm bmm cat chunk clamp clone cumsum diag div dot einsum
exp expand flatten flip gather index_select log log_softmax logsumexp masked_fill matmul max
maximum mean min minimum mm mul mv outer permute pow reciprocal repeat reshape roll rsqrt sigmoid
sign softmax split sqrt square squeeze stack std sub sum tanh tensordot transpose tril triu unbind
unflatten unsqueeze var where linalg.vector_norm linalg.multi_dot inner
"""
CONV_NET_OPS = frozenset(_TORCH.split()) | {f"nn.functional.{name}" for name in _NN.split()}
# These return memory as they find it.
_UNINITIALIZED = ("empty", "new_empty", "resize_")
_LONGEST_LINE = 2000  # characters that one would paste


@dataclass(frozen=True)
class OpCase:
    """One sample of an operator: of PyTorch's database by its place there, or of ours."""

    op: str
    variant: str
    index: int
    numel: int
    batched: int = 0  # the highest order that is composed with vmap

    def stages(self, highest: int) -> list[str]:
        """What to compare of it."""
        return all_stages(highest, batched=self.batched)

    def _sample(self, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return _samples(self.op, self.variant, dtype)[self.index]

    def call(self, dtype: torch.dtype, *, redraw: bool = False) -> Call:
        """The call to compare; with ``redraw``, on inputs that can be written in few words."""
        fn, args, kwargs = self._sample(dtype)
        if redraw:
            args, kwargs = redrawn(args, kwargs)
        return Call(fn, args, kwargs, reference=references.get(self.op))

    def spell(self, dtype: torch.dtype, *, redraw: bool) -> str:
        """The arguments of `check` that repeat it: in short, or if that is long or cannot be, the case."""
        call = self.call(dtype, redraw=redraw)
        name = self.op if call.fn is _attribute(self.op) else f"op_db.{self.op}:{self.variant}"
        try:
            line = spell(name, call.args, call.kwargs)
        except Unspellable:
            return repr(self)
        return line if len(line) < _LONGEST_LINE else repr(self)


def _ours() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    ties = tensor(2, 2, 7, 6).detach().mul(2).round().clamp(0).requires_grad_()  # as after a relu
    fields: dict[str, Any]
    for fields in (
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 1},
        {"kernel_size": 2, "stride": 3, "ceil_mode": True},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "ceil_mode": True},
        {"kernel_size": 2, "stride": 2, "dilation": 2, "padding": 1},
    ):
        for x in (tensor(2, 2, 7, 6), ties):
            yield "nn.functional.max_pool2d", (x,), fields
    for x in (tensor(1, 2, 5, 4, 4), tensor(1, 2, 5, 4, 4).detach().round().requires_grad_()):
        for fields in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}):
            yield "nn.functional.max_pool3d", (x,), fields
    for x in (tensor(2, 2, 9), tensor(2, 2, 9).detach().round().requires_grad_()):
        yield "nn.functional.max_pool1d", (x, 3, 2, 1), {}
    for dim in (1, 2, 3):
        for size in (1, 2):
            yield f"nn.functional.adaptive_max_pool{dim}d", (tensor(2, 2, *(4,) * dim), size), {}
    for dim in (2, 3):
        op, x = f"nn.functional.avg_pool{dim}d", tensor(1, 2, *(5,) * dim)
        for fields in (
            {"divisor_override": 3},
            {"padding": 1, "ceil_mode": True, "divisor_override": 5},
            {"padding": 1, "count_include_pad": False},
            {"padding": 1, "ceil_mode": True},
        ):
            yield op, (x, 2), fields
    logits = tensor(4, 5, low=-3, high=3)
    labels = torch.tensor([0, 4, 1, 1])
    weight = tensor(5, low=0.1, high=1, seed=1, requires_grad=False)
    for fields in (
        {},
        {"reduction": "sum"},
        {"weight": weight},
        {"weight": weight, "label_smoothing": 0.1, "ignore_index": 4},
        {"reduction": "none", "label_smoothing": 0.3},
    ):
        yield "nn.functional.cross_entropy", (logits, labels), fields
    for activation, x in (("elu", tensor(2, 3)), ("celu", tensor(2, 3)), ("selu", tensor(2, 3))):
        for fields in ({}, {"inplace": True}) + (({"alpha": 0.7},) if activation != "selu" else ()):
            yield f"nn.functional.{activation}", (x,), fields
    for p in (1, 2, 3, float("inf"), -float("inf")):
        yield "norm", (tensor(3, 4), p, 1), {}
    yield "einsum", ("bchw,kc->bkhw", tensor(2, 2, 3, 3), tensor(4, 2, seed=1)), {}
    yield "einsum", ("bik,bkj->bij", tensor(2, 2, 3), tensor(2, 3, 2, seed=1)), {}


@functools.lru_cache(maxsize=1)
def _own_samples() -> dict[str, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    own: dict[str, list] = {}
    for op, args, kwargs in _ours():
        own.setdefault(op, []).append((_attribute(op), args, kwargs))
    return own


def _attribute(op: str) -> Any:
    at: Any = torch
    for name in op.split("."):
        at = getattr(at, name, None)
    return at


def function(name: str) -> Any:
    """The function of a spelled name: an attribute of torch, or ``op_db.``, a name and variant."""
    fn = _info(*name[6:].split(":")).op if name.startswith("op_db.") else _attribute(name)
    if not callable(fn):
        raise ValueError(f"torch has no function {name!r}")
    return fn


@functools.lru_cache(maxsize=1)
def _database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def _info(op: str, variant: str) -> Any:
    return next(i for i in _database() if (i.name, i.variant_test_name) == (op, variant))


@functools.lru_cache(maxsize=4)
def _samples(
    op: str, variant: str, dtype: torch.dtype
) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    if variant == "ours":
        return _own_samples()[op]
    info = _info(op, variant)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return [
        (info.op, (sample.input, *sample.args), dict(sample.kwargs))
        for sample in info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
    ]


def _features(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[tuple[str, str]]:
    def kind(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dim()}-d{' empty' * (value.numel() == 0)} {value.is_floating_point()}"
        return (
            repr(value) if not isinstance(value, (list, tuple)) else str([kind(v) for v in value])
        )

    return {(str(i), kind(a)) for i, a in enumerate(args)} | {
        (k, kind(v)) for k, v in kwargs.items()
    }


def _numel(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sum(t.numel() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))


def _batched(index: int) -> int:
    """The highest order under vmap, which takes the most time: of an operator's first sample."""
    return 2 if index == 0 else 0


def op_cases(
    dtype: torch.dtype, *, all_ops: bool = False, only: str = "*", most: int = 8
) -> Iterator[OpCase]:
    """At most ``most`` samples an operator, each with an argument that no earlier one has."""
    for op, samples in _own_samples().items():
        if not fnmatchcase(op, only):
            continue
        for i, (_, args, kwargs) in enumerate(samples):
            yield OpCase(op, "ours", i, _numel(args, kwargs), _batched(i))
    for info in _database():
        if not fnmatchcase(info.name, only) or not (all_ops or info.name in CONV_NET_OPS):
            continue
        if dtype not in info.dtypes or info.name.startswith(_UNINITIALIZED):
            continue
        if "max_unpool" in info.name and info.variant_test_name != "grad":
            continue  # repeated indices: which of them wins is not defined
        seen: set[tuple[str, str]] = set()
        kept = 0
        try:
            samples = _samples(info.name, info.variant_test_name, dtype)
        except (
            Exception
        ):  # of the database itself: drawn again where the case is run, and told there
            yield OpCase(info.name, info.variant_test_name, 0, 0)
            continue
        for i, (_, args, kwargs) in enumerate(samples):
            features = _features(args, kwargs)
            if kept < most and not features <= seen:
                seen |= features
                yield OpCase(
                    info.name, info.variant_test_name, i, _numel(args, kwargs), _batched(kept)
                )
                kept += 1
