"""The option `--json FILE` of the commands that write a report."""

import argparse
import os
import sys
from pathlib import Path
from typing import TextIO

_STDOUT = Path("-")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """The option itself."""
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the report as JSON, what there is of it every few seconds; - is stdout, at the end",
    )


def check(path: Path | None) -> None:
    """Raises ValueError where the file cannot be there."""
    if path and not path.absolute().parent.is_dir():
        raise ValueError(f"no folder for {path}")


def write(path: Path | None, text: str, *, done: bool = True) -> None:
    """Write the report in place of what was there: who reads the file, at any time, reads all of one."""
    if path == _STDOUT:
        if done:
            print(text)
    elif path:
        new = path.with_name(f".{path.name}.new")
        new.write_text(text + "\n")
        os.replace(new, path)


def other(path: Path | None) -> TextIO:
    """Where tables go."""
    return sys.stderr if path == _STDOUT else sys.stdout
