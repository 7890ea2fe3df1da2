"""The command `torch-convfix`."""

import argparse
import importlib
import sys

# Each module has `add_arguments(parser)` and `main(args) -> exit code`; loaded when asked for.
_COMMANDS = {
    "audit": (
        "torch_convfix.commands.audit",
        "is my own loss right, and if not, which call is wrong",
    ),
    "status": ("torch_convfix.commands.status", "what is registered, for which device"),
    "tpu": ("torch_convfix.commands.tpu", "what a step costs a TPU that need not be there"),
    "verify": ("torch_convfix.commands.verify", "which operators' derivatives a device gets wrong"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="torch-convfix",
        description="\n".join(f"{name:8}{says}" for name, (_, says) in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=sorted(_COMMANDS), help="`torch-convfix COMMAND --help`")
    argv = sys.argv[1:] if argv is None else argv
    name = parser.parse_args(argv[:1]).command
    command = importlib.import_module(_COMMANDS[name][0])
    parser = argparse.ArgumentParser(prog=f"torch-convfix {name}", description=command.__doc__)
    command.add_arguments(parser)
    return command.main(parser.parse_args(argv[1:]))
