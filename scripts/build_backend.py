"""What pip calls: setuptools with scikit-build-core, or one sentence where a build without isolation
finds them missing."""

import importlib.metadata
import sys

try:
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        raise ImportError
    from scikit_build_core.setuptools.build_meta import *  # noqa: F403
except ImportError:
    sys.exit(
        "torch-convfix: a build without isolation needs its tools in the environment: type "
        "`pip install 'setuptools>=77' 'scikit-build-core>=1.1' cmake ninja`, then repeat this command."
    )
