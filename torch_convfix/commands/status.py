"""Show what torch_convfix has registered, with which options and versions."""

import argparse

from torch_convfix._devices import status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes none."""


def main(args: argparse.Namespace) -> int:
    """Print the status."""
    print(status())
    return 0
