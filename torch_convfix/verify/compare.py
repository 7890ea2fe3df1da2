"""One call on a device against float64 on the CPU."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock
from zlib import crc32

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_convfix.verify.derivatives import (
    VALUE,
    Call,
    Draw,
    Failure,
    Program,
    Results,
    evaluate,
    random_like,
)
from torch_convfix.verify.devices import Device, kernels
from torch_convfix.verify.formulas import formulas

REFUSED = "the CPU refuses it: "  # how a reason to skip begins

# Relative errors from here on are wrong: far above the roundings of the special functions of a device,
# and far below what a dropped term or a flipped sign brings.
TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}
# The inputs and cotangents of a sweep are of this size: a stage whose results are all smaller may be
# zero but for the rounding of larger terms.
_SIZE = 1.0
# A result smaller than this share of the largest of its stage is compared with that share.
_SHARE = 0.1
# How much worse a device may round than the CPU in the same dtype, or than its inputs were rounded;
# a large error is never taken for rounding.
_ROUNDINGS = 30
_LARGEST_ROUNDING = 0.05


@dataclass
class Outcome:
    """What became of one call."""

    errors: dict[str, float] = field(default_factory=dict)  # worst relative error of each stage
    wrong: dict[str, str] = field(default_factory=dict)  # stage: the worst result in it
    raised: dict[str, str] = field(default_factory=dict)  # the device raised and the CPU did not
    refused: dict[str, str] = field(default_factory=dict)  # both raised
    accepted: bool = False  # the CPU raised and the device did not
    skipped: str = ""

    def fault(self) -> str:
        """What is wrong, by its first stage; empty if nothing is."""
        if self.wrong:
            return next(iter(self.wrong))
        if self.accepted:
            return "accepts what the CPU refuses"
        return ""


def compare(
    call: Call,
    device: Device,
    stages: Sequence[str],
    dtype: torch.dtype,
    tolerance: float | None = None,
    size: float = _SIZE,
    *,
    stock: bool = True,
) -> Outcome:
    """Compare the stages of one call. Its floating tensors are rounded to ``dtype`` first.

    The reference is the CPU's own kernels, formulas where these are wrong; with ``stock=False`` ours
    there, for what PyTorch lacks.

    Errors are relative to the largest number of a result, to a tenth of the largest of its stage, or
    to a tenth of ``size``, whichever is largest.
    """
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    if call.must_raise:
        return _compare_refusal(call, device)
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: _cast(t, dtype), (call.args, call.kwargs))
    program = Program(call.fn, args, kwargs)
    inputs = program.tensors
    if any(t.layout is not torch.strided for t in inputs):
        return Outcome(skipped="it takes sparse tensors")
    reference = Program(call.reference or call.fn, args, kwargs)
    cotangents: dict[str, Tensor] = {}

    def draw(name: str, like: Tensor) -> Tensor:
        if name not in cotangents:
            cotangents[name] = _cast(random_like(crc32(name.encode()), like), dtype)
        return cotangents[name].to(like.dtype)

    def in_float64(
        inputs: Sequence[Tensor],
        draw: Draw = draw,
        stages: Sequence[str] = stages,
        dtype: torch.dtype = torch.float64,
    ) -> dict[str, Results | Failure]:
        tensors = [_cast(t, dtype) for t in inputs]
        exact = formulas() if dtype == torch.float64 else contextlib.nullcontext()
        with kernels("cpu", stock=stock), exact:
            return evaluate(reference, tensors, stages, draw, reference=True)

    torch.manual_seed(0)
    want = in_float64(inputs)
    if isinstance(want[VALUE], Failure):
        return Outcome(skipped=REFUSED + want[VALUE].line)
    if not want[VALUE]:
        return Outcome(skipped="it returns no tensor")
    torch.manual_seed(1)
    with mock.patch.object(
        torch, "manual_seed", _other_seed
    ):  # the database's samples seed themselves
        again = in_float64(inputs, stages=[VALUE])[VALUE]
    if _random(want[VALUE], again):
        return Outcome(skipped="random")

    comparable = {s: r for s, r in want.items() if not isinstance(r, Failure)}
    outcome = Outcome(refused={s: r.line for s, r in want.items() if isinstance(r, Failure)})
    got = run_on(device, program, inputs, list(comparable), cotangents)
    outside = any(t.isnan().any() for t in want[VALUE].values())
    roundings: list[dict[str, Results | Failure]] = []
    for stage, wanted in comparable.items():
        result = got.get(stage)
        if isinstance(result, Failure):
            if call.reference is None and _cpu_raises(program, inputs, stage, draw, stock):
                outcome.refused[stage] = result.line
            else:
                outcome.raised[stage] = result.line
            continue
        if result is None:  # an order after one that raised
            continue
        if outside and stage != VALUE:
            wanted = {
                n: _where_defined(t, result[n]) if n in result else t for n, t in wanted.items()
            }
        error, worst = worst_error(result, wanted, size)
        outcome.errors[stage] = error
        if error > tolerance and dtype != torch.float64:
            roundings = roundings or [
                in_float64(
                    [_perturbed(t, dtype) for t in inputs],
                    lambda name, like: _perturbed(draw(name, like), dtype),
                ),
                in_float64(inputs, dtype=dtype),
            ]
            if error <= _limit(roundings, wanted, stage, size):
                continue
        if error > tolerance:
            outcome.wrong[stage] = worst
    return outcome


def _limit(
    roundings: Sequence[Mapping[str, Results | Failure]],
    want: Results,
    stage: str,
    size: float,
) -> float:
    """The error that rounding alone may bring to a stage."""
    moved = [m for r in roundings if isinstance(m := r.get(stage), dict)]
    errors = [worst_error(m, want, size)[0] for m in moved]
    return min(_ROUNDINGS * max(errors, default=0.0), _LARGEST_ROUNDING)


def run_on(
    device: Device,
    program: Program,
    inputs: Sequence[Tensor],
    stages: Sequence[str],
    cotangents: Mapping[str, Tensor],
) -> dict[str, Results | Failure]:
    """`evaluate` on a device, in one step if that works, else a step for each stage."""

    def step(stages: Sequence[str]) -> dict[str, Results | Failure]:
        results: dict[str, Results | Failure] = {}

        def body(tensors: Sequence[Tensor]) -> list[Tensor]:
            given = dict(zip(cotangents, tensors[len(inputs) :], strict=True))
            results.update(
                evaluate(program, tensors[: len(inputs)], stages, lambda name, _: given[name])
            )
            return [t for r in results.values() if isinstance(r, dict) for t in r.values()]

        outputs = iter(device.run(body, [*inputs, *cotangents.values()]))
        return {
            stage: r if isinstance(r, Failure) else {name: next(outputs) for name in r}
            for stage, r in results.items()
        }

    with contextlib.suppress(Exception):
        return step(stages)
    results: dict[str, Results | Failure] = {}
    for stage in stages:  # after the failed step's tensors are gone
        try:
            taken = step([stage])
            if stage in taken:  # else an order before it raised
                results[stage] = taken[stage]
        except Exception as e:
            results[stage] = Failure.of(e)
    return results


def worst_error(got: Results, want: Results, size: float) -> tuple[float, str]:
    """The worst relative error among the results of a stage, and which one has it."""
    scale = max([size, *(_size(t) for t in want.values())])
    errors = {
        name: _error(got[name], t, scale) if name in got else float("inf")
        for name, t in want.items()
    }
    worst = max(errors, key=lambda name: errors[name], default="")
    return errors.get(worst, 0.0), worst


def _where_defined(want: Tensor, got: Tensor) -> Tensor:
    """Outside of its domain a function has no derivative: what the device has there is no fault."""
    if got.shape != want.shape:
        return want
    return torch.where(want.isnan(), got.to(want.dtype), want)


def _size(t: Tensor) -> float:
    finite = t[torch.isfinite(t)].abs() if t.is_floating_point() else t
    return finite.max().item() if t.is_floating_point() and finite.numel() else 0.0


def _error(got: Tensor, want: Tensor, scale: float) -> float:
    if got.shape != want.shape:
        return float("inf")
    got, want = got.to(torch.float64), want.to(torch.float64)
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, torch.zeros_like(want), (got - want).abs())
    if difference.numel() == 0:
        return 0.0
    if not difference.isfinite().all():
        return float("inf")
    largest = difference.max().item()
    scale = max(_size(want), _SHARE * scale)
    if largest == 0:
        return 0.0
    return largest / scale if scale else float("inf")


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    if t.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    elif not t.is_floating_point():
        return t.detach().clone()
    return t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad)


def _perturbed(t: Tensor, dtype: torch.dtype) -> Tensor:
    if not t.is_floating_point():
        return t
    noise = torch.finfo(dtype).eps * random_like(0, t).clamp(-1, 1).double()
    return (t.detach().double() * (1 + noise)).requires_grad_(t.requires_grad)


_manual_seed = torch.manual_seed


def _other_seed(seed: int) -> torch.Generator:
    return _manual_seed(seed + 1)


def _random(first: Results | Failure, second: Results | Failure) -> bool:
    if isinstance(first, Failure) or isinstance(second, Failure):
        return False
    return any(_error(second[name], t, 1.0) > 0 for name, t in first.items())


def _cpu_raises(
    program: Program, inputs: Sequence[Tensor], stage: str, draw: Draw, stock: bool
) -> bool:
    tensors = [_cast(t, torch.float64) for t in inputs]
    with kernels("cpu", stock=stock):
        return isinstance(evaluate(program, tensors, [stage], draw).get(stage), Failure)


def _compare_refusal(call: Call, device: Device) -> Outcome:
    program = Program(call.fn, call.args, call.kwargs)
    got = run_on(device, program, program.tensors, [VALUE], {})[VALUE]
    if isinstance(got, Failure):
        return Outcome(refused={VALUE: got.line})
    return Outcome(accepted=True)
