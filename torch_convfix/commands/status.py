"""Show what torch_convfix has registered, with which options and versions."""

import argparse
import importlib.metadata
import os
import platform
import sys

from torch_convfix import _C
from torch_convfix._devices import status

# Of the environment, what decides how a stack runs or what ours does.
_PREFIXES = (
    "TORCH",
    "PJRT_",
    "XLA_",
    "TPU_",
    "LIBTPU_",
    "JAX_",
    "PYTORCH_",
    "ALLOW_MULTIPLE_LIBTPU",
)
_PACKAGES = ("torchvision", "jax", "jaxlib", "libtpu", "numpy", "rich", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to say all that a report of a fault should."""
    parser.add_argument(
        "--bug-report", action="store_true", help="also platform, packages, environment and build"
    )


def main(args: argparse.Namespace) -> int:
    """Print the status."""
    print(status())
    if args.bug_report:
        print(*_facts(), sep="\n")
    return 0


def _facts() -> list[str]:
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    lines = [
        f"python: {sys.version}",
        f"platform: {platform.platform()}, {os.cpu_count()} CPUs, {' '.join(platform.libc_ver())}",
        "packages: " + ", ".join(f"{p} {installed[p]}" for p in _PACKAGES if p in installed),
        f"extension: {_C.__file__}",
    ]
    for ours in importlib.metadata.distributions(name="torch-convfix"):
        if wheel := ours.read_text("WHEEL"):  # not the metadata that a build leaves in the source
            # Where pip had it from: a folder, a commit, an archive; nothing where from an index.
            lines.append(
                f"installed from: {(ours.read_text('direct_url.json') or 'an index').strip()}"
            )
            lines += wheel.strip().splitlines()
    if "torch_xla" in sys.modules:
        import torch_xla.runtime as runtime

        lines.append(f"torch_xla device: {runtime.device_type()}, {runtime.global_device_count()}")
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES):
            lines.append(f"{name}={os.environ[name]}")
    return lines
