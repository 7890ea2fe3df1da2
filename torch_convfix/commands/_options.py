"""The options that several commands have: one name, one spelling and one text for one meaning."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_convfix import _target

DEVICES = ": xla, cpu, cuda, tpu (traced if there is none) or a backend's; by default the installed stack's"
DTYPES = ("float64", "float32", "float16", "bfloat16")


def _number(kind: Callable[[str], float], allowed: str, fits: Callable[[float], bool]) -> Any:
    def number(text: str) -> float:
        try:
            if fits(value := kind(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")

    return number


COUNT = _number(int, "a whole number, 0 or more", lambda value: value >= 0)
NATURAL = _number(int, "a whole number, 1 or more", lambda value: value >= 1)
AMOUNT = _number(float, "a number above 0", lambda value: value > 0)

# {of} is what a command says of its own.
SHARED: dict[str, dict[str, Any]] = {
    "--input": {
        "action": "append",
        "default": [],
        "metavar": "SHAPE[:DTYPE]",
        "help": _target.INPUT_HELP,
    },
    "--device": {"help": "where to compute{of}"},
    "--stack": {"choices": ("torch_xla", "torch_tpu"), "help": "which TPU stack{of}"},
    "--topology": {
        "default": "v5e",
        "metavar": "NAME",
        "help": "of the TPU, as v5e, or the compiler's own name, as v5e:2x2{of}",
    },
    "--dtype": {"choices": DTYPES, "help": "of the inputs, on the device"},
    "--order": {"type": COUNT, "default": 2, "metavar": "N", "help": "the highest order{of}"},
    "--tolerance": {
        "type": AMOUNT,
        "metavar": "ERROR",
        "help": "relative error from which a result is wrong",
    },
    "--only": {
        "default": "*",
        "metavar": "PATTERN",
        "help": "a shell pattern, for the names of {of}",
    },
    "--quick": {"action": "store_true", "help": "a small run{of}"},
    "--cases": {"type": COUNT, "metavar": "N", "help": "how many random convolutions"},
    "--seed": {"type": int, "default": 0, "metavar": "N", "help": "of the random convolutions"},
    "--rounds": {"type": NATURAL, "metavar": "N", "help": "how often each is timed{of}"},
    "--jobs": {"type": NATURAL, "metavar": "N", "help": "processes at a time{of}"},
    "--limit": {"type": AMOUNT, "metavar": "SECONDS", "help": "most time for {of}"},
    "--cpu-limit": {"type": AMOUNT, "metavar": "SECONDS", "help": "most CPU time for {of}"},
    "--memory": {"type": AMOUNT, "metavar": "GIB", "help": "most memory for {of}"},
    "--stop-after": {
        "type": AMOUNT,
        "metavar": "SECONDS",
        "help": "begin nothing new after so long{of}",
    },
    "--stock": {
        "action": "store_true",
        "help": "with the device's own kernels in place of ours",
    },
    "--compare": {"action": "store_true", "help": "the device's own kernels beside ours"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write the report as JSON{of}"},
    "--html": {"type": Path, "metavar": "FILE", "help": "write the report as a page with charts"},
    "--resume": {"action": "store_true", "help": "go on from what --json FILE has{of}"},
    "--out": {"type": Path, "help": "where to write {of}"},
}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """The text as it is written, and each option's default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        plain = isinstance(action.default, (int, float, str, Path)) and action.default != "*"
        if (
            not plain
            or isinstance(action.default, bool)
            or action.default in ("", argparse.SUPPRESS)
        ):
            return action.help or ""
        return f"{action.help} (default %(default)s)"


def add(to: argparse._ActionsContainer, name: str, of: str = "", **own: Any) -> None:
    """Add the shared option ``name``; ``own`` are a command's choices and default."""
    shared = SHARED[name]
    to.add_argument(name, **{**shared, **own, "help": shared["help"].format(of=of)})
