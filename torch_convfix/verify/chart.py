"""The chart of a report: worst relative error of each operator, stage by stage."""

import io
import math
from collections.abc import Mapping, Sequence

from torch_convfix.verify.derivatives import all_stages
from torch_convfix.verify.findings import Finding

_FLOOR, _CEILING = 1e-18, 1e3  # where an exact result and one that is not finite are drawn


def error_chart(errors: Mapping[str, Mapping[str, float]], faults: Sequence[Finding]) -> str:
    """Inline SVG: a dot for each operator and stage."""
    from matplotlib.figure import Figure  # no pyplot: that would want a display

    reached = {stage for by_stage in errors.values() for stage in by_stage}
    stages = [stage for stage in all_stages(9, composed=3, batched=3) if stage in reached]
    wrong = {(f.op, stage) for f in faults for stage in f.stages}
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for is_wrong, color, label in ((False, "#4477aa", "right"), (True, "#cc3311", "wrong")):
        points = [
            (stages.index(stage) + _jitter(op), min(max(error, _FLOOR), _CEILING))
            for op, by_stage in errors.items()
            for stage, error in by_stage.items()
            if ((op, stage) in wrong) == is_wrong
        ]
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=14, color=color, alpha=0.7, label=label, lw=0)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 10, _CEILING * 10)
    axes.set_xlim(-0.5, max(len(stages), 1) - 0.5)
    axes.set_xticks(range(len(stages)), stages, rotation=90)
    axes.set_ylabel("worst relative error")
    axes.spines[["top", "right"]].set_visible(False)
    if reached:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue()
    return text[text.index("<svg") :]


def _jitter(op: str) -> float:
    """A place within a stage's column, the same one for an operator in every column."""
    return 0.6 * math.modf(sum(map(ord, op)) * 0.61803398875)[0] - 0.3
