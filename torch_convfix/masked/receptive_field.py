"""Which inputs an output depends on, measured on the function itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike
from typing import Any, Literal

import torch

Method = Literal["gradient", "nan", "perturb"]
Function = Callable[[torch.Tensor], torch.Tensor]


def receptive_field(
    fn: Function,
    input: torch.Tensor,
    output_index: Any,
    method: Method = "gradient",
    magnitude: float = 1.0,
) -> torch.Tensor:
    """How strongly each element of `input` reaches `fn(input)[output_index]`; 0 where it does not.

    Args:
        fn: from one floating tensor to one tensor, without randomness.
        output_index: any index of the output; where it selects several elements, the strongest
            dependence counts.
        method: "gradient" is the size of the derivative, one backward pass an element of the
            output. "perturb" is the largest change of the output when the input element grows by
            `magnitude`, over `magnitude`; one call an element, no gradients. "nan" plants NaNs by
            bisection, about 2 log2(numel) calls a dependent element at most, no gradients; it finds
            every path that carries a NaN (0 * NaN too, but not a comparison or `where`) and
            answers 1.0.

    Returns:
        A tensor of the shape and dtype of `input`, on the CPU.

    Raises:
        ValueError: for an unknown method, an input that is not floating, a result that holds a NaN
            already (method "nan").
    """
    if not input.is_floating_point():
        raise ValueError(f"input: got dtype {input.dtype}; it must be a floating dtype")
    input = input.detach()
    if method == "gradient":
        return _by_gradient(fn, input, output_index)
    if method not in ("nan", "perturb"):
        raise ValueError(f'method: got {method!r}; use "gradient", "nan" or "perturb"')

    @torch.no_grad()
    def output(changed: torch.Tensor) -> torch.Tensor:
        return fn(changed.view(input.shape).to(input.device))[output_index].cpu()

    flat = input.cpu().flatten()
    base = output(flat)
    field = torch.zeros_like(flat)
    if method == "perturb":
        for i in range(flat.numel()):
            changed = flat.clone()
            changed[i] += magnitude
            field[i] = (output(changed) - base).abs().max() / magnitude
    else:
        if base.isnan().any():
            raise ValueError("input: fn(input)[output_index] has a NaN already; give finite values")
        field[list(_reached_by_nan(output, flat))] = 1
    return field.view(input.shape)


def leaks(
    fn: Function,
    input: torch.Tensor,
    output_index: Any,
    allowed: torch.Tensor,
    method: Method = "gradient",
    magnitude: float = 1.0,
) -> list[tuple[tuple[int, ...], float]]:
    """The inputs outside `allowed` that reach the output, each with its size, the largest first.

    `allowed` is boolean and broadcasts to `input`; the other arguments are those of
    `receptive_field`. An empty list means no leak.
    """
    field = receptive_field(fn, input, output_index, method, magnitude)
    outside = _outside(field, allowed)
    found = [(tuple(i), field[tuple(i)].item()) for i in outside.nonzero().tolist()]
    return sorted(found, key=lambda leak: -leak[1])


def plot_receptive_field(
    fn: Function,
    input: torch.Tensor,
    output_index: Any,
    path: str | PathLike[str],
    allowed: torch.Tensor | None = None,
    method: Method = "gradient",
    magnitude: float = 1.0,
) -> torch.Tensor:
    """Save a heat map of `receptive_field` over the last two dimensions; returns the field.

    Colours are log10 of the strongest dependence over the other dimensions. Inputs outside
    `allowed` that reach the output are framed in red. Needs matplotlib (the extra "plot").
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(
            "plot_receptive_field needs matplotlib: pip install 'torch-convfix[plot]'"
        ) from error
    field = receptive_field(fn, input, output_index, method, magnitude)
    outside = _outside(field, torch.tensor(True) if allowed is None else allowed)
    strength, outside = (t.flatten(0, -3).amax(0) if t.dim() > 2 else t for t in (field, outside))
    strength, outside = torch.atleast_2d(strength), torch.atleast_2d(outside)
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(strength.double().log10().masked_fill(strength == 0, torch.nan).numpy())
    figure.colorbar(image, label="log10 of the dependence")
    for row, column in outside.nonzero().tolist():
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="red", linewidth=2))
    axes.set_title(f"{int((strength != 0).sum())} positions seen, {int(outside.sum())} leak")
    figure.savefig(path, dpi=150)
    return field


def _outside(field: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    try:
        allowed = allowed.cpu().bool().expand_as(field)
    except RuntimeError as error:
        raise ValueError(
            f"allowed must broadcast to the input, {list(field.shape)}, got {list(allowed.shape)}"
        ) from error
    return (field != 0) & ~allowed


def _by_gradient(fn: Function, input: torch.Tensor, output_index: Any) -> torch.Tensor:
    input = input.clone().requires_grad_()
    with torch.enable_grad():
        output = fn(input)[output_index]
    if not output.requires_grad:
        return torch.zeros_like(input, device="cpu", requires_grad=False)
    gradients = [
        torch.autograd.grad(
            element, input, retain_graph=True, allow_unused=True, materialize_grads=True
        )[0]
        for element in output.flatten()
    ]
    return torch.stack(gradients).abs().amax(0).cpu()


def _reached_by_nan(output: Function, flat: torch.Tensor) -> Iterator[int]:
    """Elements whose NaN reaches the output: halves that let one through are halved again."""
    regions = [(0, flat.numel())]
    while regions:
        begin, end = regions.pop()
        changed = flat.clone()
        changed[begin:end] = torch.nan
        if not output(changed).isnan().any():
            continue
        middle = (begin + end) // 2
        if middle == begin:
            yield begin
        else:
            regions += [(begin, middle), (middle, end)]
