"""The command `torch-convfix`: one subcommand a tool, each in a module of its own."""

import argparse
import importlib
import sys

# Each module has `add_arguments(parser)` and `main(args) -> exit code`; loaded when asked for.
_COMMANDS = {
    "audit": "torch_convfix._audit_command",
    "status": "torch_convfix._status_command",
    "tpu": "torch_convfix.tpu._command",
    "verify": "torch_convfix._verify_command",
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    parser = argparse.ArgumentParser(prog="torch-convfix", description=__doc__)
    parser.add_argument("command", choices=sorted(_COMMANDS))
    argv = sys.argv[1:] if argv is None else argv
    name = parser.parse_args(argv[:1]).command
    command = importlib.import_module(_COMMANDS[name])
    parser = argparse.ArgumentParser(prog=f"torch-convfix {name}", description=command.__doc__)
    command.add_arguments(parser)
    return command.main(parser.parse_args(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
