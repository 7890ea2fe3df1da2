"""The build: CMake, called by setuptools through scikit-build-core's plugin.

The plugin, and not a build_ext of our own: it finds CMake and ninja, installs them where they are
missing, and knows editable installs. The extension is for one minor version of torch: its folder and
the requirement of the wheel say which, so one source tree serves several torches side by side.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scikit_build_core.setuptools.build_cmake import BuildCMake
from setuptools import setup

_FIND = """import importlib.metadata, importlib.util, os, sys
print(sys.implementation.cache_tag, importlib.metadata.version("torch"))
print(os.path.realpath(importlib.util.find_spec("torch").submodule_search_locations[0]))"""
_LEAST = (2, 9)


def _frontend() -> list[str]:
    """The interpreter that runs pip or build, where this one is of an environment for the build alone."""
    process = Path(f"/proc/{os.getppid()}")
    try:
        name = process.joinpath("cmdline").read_text().split("\0")[0]
        path = dict(
            line.split("=", 1)
            for line in process.joinpath("environ").read_text().split("\0")
            if "=" in line
        ).get("PATH")
        command = shutil.which(
            process.joinpath("cwd").resolve() / name if "/" in name else name, path=path
        )
    except OSError:  # no /proc, or not ours to read
        return []
    return [command, "-E"] if command and Path(name).name.startswith("python") else []


def _torch() -> tuple[str, str]:
    """The folder of the torch to build against, and its minor version."""
    # -E: without the PYTHONPATH by which pip hides the environment that it installs into.
    for python in ([sys.executable], [sys.executable, "-E"], _frontend()):
        found = python and subprocess.run([*python, "-c", _FIND], capture_output=True, text=True)
        if not found or found.returncode:
            continue
        tag, version, folder = found.stdout.split(maxsplit=2)
        if tag != sys.implementation.cache_tag:
            continue
        minor = version.split(".")[:2]
        if tuple(map(int, minor)) < _LEAST:
            sys.exit(
                f"torch-convfix needs torch 2.9 or newer and found torch {version}: "
                "type `pip install --upgrade torch`, then repeat this command."
            )
        return folder.strip(), ".".join(minor)
    sys.exit(
        "torch-convfix is built against the torch that it will run with, and found none: type "
        "`pip install torch` (for a TPU `pip install torch==2.9.0 torch_xla==2.9.0`, or "
        "`pip install torch_tpu`), then repeat this command (other installers than pip: with "
        "--no-build-isolation)."
    )


requirements = ["numpy", "rich>=13", "psutil>=6"]
if "sdist" in sys.argv or sys.argv[-1] == "egg_info":  # sources are for any torch
    setup(install_requires=["torch>=2.9", *requirements])
else:
    torch, minor = _torch()
    # ON: a room of csrc is one translation unit, a third of the work. scripts/setup compiles file by
    # file, for who changes one at a time, and so finds a file that lacks an include.
    unity = os.environ.get("TORCH_CONVFIX_UNITY", "ON")
    base = Path(f"build-{sys.implementation.cache_tag}-torch{minor}" + "-unity" * (unity == "ON"))

    class _BuildCMake(BuildCMake):
        def finalize_options(self) -> None:
            self.build_temp = str(base)  # an editable build would take a temporary folder
            super().finalize_options()

    shutil.rmtree(
        base / "lib", ignore_errors=True
    )  # setuptools would pack what an earlier build left
    setup(
        install_requires=[f"torch=={minor}.*", *requirements],
        options={"build": {"build_base": str(base), "build_lib": str(base / "lib")}},
        cmdclass={"build_cmake": _BuildCMake},
        cmake_source_dir=".",
        cmake_install_dir=f"torch_convfix/_torch_{minor.replace('.', '_')}",
        cmake_args=[f"-DTORCH={torch}", f"-DCMAKE_UNITY_BUILD={unity}"],
    )
