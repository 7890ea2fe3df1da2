"""The command `torch-convfix`."""

import argparse
import importlib
import os
import sys

from torch_convfix import __version__
from torch_convfix.commands._options import Formatter

# Each module has `add_arguments(parser)` and `main(args) -> exit code`; loaded when asked for.
_COMMANDS = {
    "audit": (
        "torch_convfix.commands.audit",
        "is my own loss right, and if not, which call is wrong",
    ),
    "completion": ("torch_convfix.commands.completion", "what a shell needs to complete these"),
    "status": ("torch_convfix.commands.status", "what is registered, for which device"),
    "tpu": ("torch_convfix.commands.tpu", "what a step costs a TPU that need not be there"),
    "verify": ("torch_convfix.commands.verify", "which operators' derivatives a device gets wrong"),
}

EXIT_CODES = {
    0: "right",
    1: "wrong, or not compared, or not compiled",
    2: "cannot start",
    130: "interrupted",
}
_EPILOG = "exit codes: " + "; ".join(f"{code} {says}" for code, says in EXIT_CODES.items())


def parser(*names: str) -> argparse.ArgumentParser:
    """The parser, with the options of the named commands."""
    top = argparse.ArgumentParser(
        prog="torch-convfix",
        description="Right and lean derivatives of convolutions: checks, estimates and facts.",
        epilog=_EPILOG,
    )
    top.add_argument("--version", action="version", version=f"torch-convfix {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, says) in _COMMANDS.items():
        if name in names:
            command = importlib.import_module(module)
            sub = commands.add_parser(
                name,
                help=says,
                description=command.__doc__,
                epilog=_EPILOG,
                formatter_class=Formatter,
            )
            command.add_arguments(sub)
            sub.set_defaults(main=command.main)
        else:
            commands.add_parser(name, help=says, add_help=False)
    return top


def every_command() -> argparse.ArgumentParser:
    """The parser with the options of all commands, whose modules it loads."""
    return parser(*_COMMANDS)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parser(*argv[:1]).parse_args(argv)
        command = args.main
        del args.command, args.main  # what is left are the command's own
        code = command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever reads has enough; Python's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
