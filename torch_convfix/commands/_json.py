"""What the option `--json FILE` asks for: the report so far, at any time."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

_STDOUT = Path("-")
HELP = ", what there is of it every few seconds; - is stdout, at the end"


def check(path: Path | None) -> None:
    """Raises ValueError where the file cannot be there."""
    if not path or path == _STDOUT:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"no folder for {path}")
    if path.is_dir():
        raise ValueError(f"a file is to be written, and {path} is a folder")
    try:  # the file system knows what no right that it states tells
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error


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
