"""Where an operator of a traced step comes from: which pass, and which line of the user's."""

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "/torch_xla/")
_PASSES = ("forward", "backward", "double backward", "triple backward")


class Origin(NamedTuple):
    """`stage` is the number of the pass of the autograd engine, in words; `source` may be empty."""

    stage: str
    source: str


def _user_line(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if not any(library in frame.filename for library in _LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return ""


# Calls the function so that what it traces bears the name.
Label = Callable[[str, Callable[[], Any]], Any]


class _Labels(TorchDispatchMode):
    def __init__(self, label: Label) -> None:
        super().__init__()
        self.label = label
        self.passes: list[int] = []  # the engine's ids of its runs, in order
        self.origins: dict[Origin, str] = {}
        self.lines: dict[Any, str] = {}  # of autograd's nodes

    def _line(self, node: Any) -> str:
        # Autograd notes where the forward made a node, and which node of a backward made it.
        if node not in self.lines:
            parent = node.metadata.get("parent_")
            stack = traceback.StackSummary()
            for entry in node.metadata.get("traceback_", []):
                place = entry.strip().split("\n")[0].split('"')
                stack.append(traceback.FrameSummary(place[1], int(place[2].split()[2][:-1]), ""))
            self.lines[node] = self._line(parent) if parent else _user_line(stack)
        return self.lines[node]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        run, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if run >= 0 and run not in self.passes:
            self.passes.append(run)
        number = 1 + self.passes.index(run) if run >= 0 else 0
        # Between two passes the forward of the penalty runs: its cost counts as forward.
        stage = _PASSES[number] if number < len(_PASSES) else f"backward {number}"
        source = self._line(node) if node else _user_line(traceback.extract_stack())
        origin = Origin(stage, source)
        name = self.origins.setdefault(origin, f"origin{len(self.origins)}")
        return self.label(name, lambda: func(*args, **(kwargs or {})))


@contextlib.contextmanager
def labelled(label: Label) -> Iterator[dict[str, Origin]]:
    """A context whose operators are labelled; afterwards the dictionary has each name's origin."""
    labels = _Labels(label)
    origins: dict[str, Origin] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(check_nan=False), labels:
            yield origins
    origins.update({name: origin for origin, name in labels.origins.items()})
