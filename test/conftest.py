"""Which tests run: those of the stacks that are installed, and without `slow` ones where --quick."""

import importlib
import importlib.util
import os

import hypothesis
import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")
# Hundreds of compiled programs kept alive ended the process inside torch_xla's sync.
os.environ.setdefault("XLA_COMPILATION_CACHE_SIZE", "32")
# Without a TPU, TorchTPU would look for one's host for minutes, and wait for libtpu's lock.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

_STACKS = ("torch_xla", "torch_tpu")
collect_ignore = [f"on_{stack}" for stack in _STACKS if importlib.util.find_spec(stack) is None]

# Deterministic: a failure in CI is a failure everywhere. Compiling takes its time: no deadline.
hypothesis.settings.register_profile(
    "default", derandomize=True, deadline=None, print_blob=True, database=None
)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # pytest-xdist's controller runs no test
    # With torch_xla most of the time is LLVM's; the larger steps of TorchTPU's tests need its code.
    if config.getoption("--quick") and importlib.util.find_spec("torch_xla"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # Before any backward on the CPU: the autograd engine counts devices once, at its first run.
    if importlib.util.find_spec("torch_xla"):
        importlib.import_module("torch_xla").device()
    elif importlib.util.find_spec("torch_tpu"):
        importlib.import_module("torch_convfix.tpu.torch_tpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.fixture(scope="session")
def case_share(request: pytest.FixtureRequest) -> float:
    """The share of hypothesis cases to draw."""
    return 0.05 if request.config.getoption("--quick") else 1.0
