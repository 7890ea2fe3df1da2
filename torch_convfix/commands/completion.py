"""Print what a shell needs to complete the commands and options of torch-convfix.

For bash: torch-convfix completion bash > ~/.local/share/bash-completion/completions/torch-convfix
"""

import argparse
import importlib
import sys

from torch_convfix._devices import is_installed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def main(args: argparse.Namespace) -> int:
    """Print it; 2 without shtab."""
    if not is_installed("shtab"):
        print("completion needs shtab: pip install 'torch-convfix[completion]'", file=sys.stderr)
        return 2
    # Not above: it loads this module.
    cli = importlib.import_module("torch_convfix.commands.cli")
    print(importlib.import_module("shtab").complete(cli.every_command(), args.shell))
    return 0
