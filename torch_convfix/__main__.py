"""``python -m torch_convfix`` is ``torch-convfix``."""

import sys

from torch_convfix.commands.cli import main

sys.exit(main())
