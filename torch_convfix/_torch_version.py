"""The extension is for one minor version of torch: find the one for the torch that is here."""

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parent
_REBUILD = "pip install --no-cache-dir --force-reinstall --no-deps"


def extension_folder() -> str:
    """The folder of the modules in C++ for the torch that is here.

    Raises:
        ImportError: where there is none.
    """
    minor = "_".join(torch.__version__.split(".")[:2])
    folder = _PACKAGE / f"_torch_{minor}"
    if any(folder.joinpath(f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return str(folder)
    built = sorted(
        f"torch {path.parent.name.removeprefix('_torch_').replace('_', '.')} ({path.name.split('.')[1]})"
        for path in _PACKAGE.glob("_torch_*/_C.*")
    )
    raise ImportError(
        f"torch_convfix in {_PACKAGE} was built for {', '.join(built) or 'no torch'} and found torch "
        f"{torch.__version__} ({EXTENSION_SUFFIXES[0].split('.')[1]}): rebuild it with "
        f"`{_REBUILD} torch-convfix`, or where its source is `pip install -e .`."
    )
