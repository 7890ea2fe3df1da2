"""The C++ interface of torch is that of one minor version: refuse any other in one sentence."""

import torch

from torch_convfix._build import TORCH_VERSION


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


if _minor(torch.__version__) != _minor(TORCH_VERSION):
    raise ImportError(
        f"torch_convfix was built for torch {TORCH_VERSION} and found torch {torch.__version__}: "
        "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps torch-convfix`."
    )
