"""A derivative against central differences of the one before it: a reference that shares no formula."""

import torch
from torch import Tensor

from torch_convfix.verify.derivatives import Program, evaluate, order_stage, random_like
from torch_convfix.verify.devices import kernels

_STEP = 1e-5  # in float64
TOLERANCE = 1e-3


def error_of_order(program: Program, order: int, *, stock: bool = True) -> float | None:
    """Relative error of a derivative on the CPU, along a random direction of all that it is of.

    Args:
        program: in float64, with the tensors to differentiate at.
        order: of the derivative, at least 1.
        stock: whether the CPU has its own kernels, or ours; what is differenced is by its own where it
            can be.

    Returns:
        None where the differences say nothing: nothing to differentiate, or not smooth enough.
    """
    drawn: dict[str, Tensor] = {}

    def draw(name: str, like: Tensor) -> Tensor:
        return drawn.setdefault(name, random_like(len(drawn), like))

    with kernels("cpu", stock=stock):
        evaluated = evaluate(program, program.tensors, [order_stage(order)], draw)
    derivative = evaluated.get(order_stage(order))
    made = [t.detach() for t in program.made]
    moved = [i for i, t in enumerate(program.tensors) if t.requires_grad]
    if not moved or not isinstance(derivative, dict):
        return None
    by = {f"input {i}": random_like(100 + i, program.tensors[i]) for i in moved}
    for name, cotangent in drawn.items():
        of, _, at = name.rpartition(" at order ")
        if int(at) < order:
            by[f"cotangent {at} of {of}"] = random_like(200 + len(by), cotangent)
    got = sum(float((derivative[name] * d).sum()) for name, d in by.items())

    def before(step: float) -> float | None:
        """The product of the results of the order before with this order's cotangents."""

        def moved_draw(name: str, like: Tensor) -> Tensor:
            of, _, at = name.rpartition(" at order ")
            return draw(name, like) + step * by.get(f"cotangent {at} of {of}", 0)

        tensors = [
            (t.detach() + step * by[f"input {i}"]).requires_grad_() if i in moved else t
            for i, t in enumerate(program.tensors)
        ]
        stage = order_stage(order - 1)
        for own in (True, stock):
            with kernels("cpu", stock=own):
                results = evaluate(program, tensors, [stage], moved_draw).get(stage)
            if isinstance(results, dict):
                break
        else:
            return None
        if any(not torch.equal(t, m) for t, m in zip(program.made, made, strict=True)):
            return (
                None  # a leaf that the target makes moves with its inputs, and that is not counted
            )
        return sum(
            float((r * drawn[f"{name} at order {order}"]).sum())
            for name, r in results.items()
            if f"{name} at order {order}" in drawn
        )

    slopes = []
    for step in (_STEP, _STEP / 4):
        ahead, behind = before(step), before(-step)
        if ahead is None or behind is None:
            return None
        slopes.append((ahead - behind) / (2 * step))
    size = max(abs(s) for s in (*slopes, got)) or 1.0
    if abs(slopes[0] - slopes[1]) > TOLERANCE * size:
        return None
    return abs(got - slopes[1]) / size
