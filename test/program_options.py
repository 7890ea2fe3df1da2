"""program_options.py PROGRAM...: the options of each, as JSON; a program whose imports are not here is null.

In a process of its own: the programs import each other's neighbours, and set up stacks.
"""

import argparse
import json
import runpy
import sys
from pathlib import Path
from typing import Any


class _Asked(BaseException):
    """A program's parser is complete."""


def as_rows(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Name, help, and what it takes, of each option."""
    return [
        {
            "name": action.option_strings[-1],
            "help": action.help,
            "takes": action.metavar or (sorted(action.choices) if action.choices else None),
        }
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    ]


def _asked(parser: argparse.ArgumentParser, *_: object) -> None:
    raise _Asked(parser)


def _options(program: Path) -> list[dict[str, Any]] | None:
    own, before = sys.path[:], set(sys.modules)
    sys.path.insert(0, str(program.parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    except _Asked as asked:
        return as_rows(asked.args[0])
    except ModuleNotFoundError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return None
    finally:
        sys.path[:] = own
        for name in {*sys.modules} - before:  # bench/ and zoo/ each have a page.py
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(program.parent)):
                del sys.modules[name]
    raise AssertionError(f"{program} parsed nothing")


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = _asked  # type: ignore[assignment,method-assign]
    print(json.dumps({p: _options(Path(p)) for p in sys.argv[1:]}))
