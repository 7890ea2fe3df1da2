"""Enabling and disabling: what is registered, what is printed, what is left behind."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import torch_convfix

DOUBLE_BACKWARD = "_convolution_double_backward"


def kernels(op: str) -> str:
    return torch._C._dispatch_dump(f"aten::{op}")


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture
def cpu_disabled():
    with torch_convfix.disabled("cpu"):
        yield


def test_enable_and_disable_are_idempotent(cpu_disabled):
    before = kernels(DOUBLE_BACKWARD)
    assert not torch_convfix.is_enabled("cpu")
    torch_convfix.enable("cpu")
    torch_convfix.enable("cpu")
    assert torch_convfix.is_enabled("cpu")
    assert "AutogradCPU" in kernels(DOUBLE_BACKWARD)
    torch_convfix.disable("cpu")
    torch_convfix.disable("cpu")
    assert not torch_convfix.is_enabled("cpu")
    assert kernels(DOUBLE_BACKWARD) == before


def test_groups_are_merged_on_xla_alone(cpu_disabled):
    with pytest.raises(ValueError, match=r"grouped='merge' is of the device xla, got .* 'cpu'"):
        torch_convfix.enable("cpu", grouped="merge")
    assert not torch_convfix.is_enabled("cpu")


def test_contexts_restore_what_was_before(cpu_disabled):
    with torch_convfix.enabled("cpu"):
        assert torch_convfix.is_enabled("cpu")
        with torch_convfix.disabled("cpu"):
            assert not torch_convfix.is_enabled("cpu")
        assert torch_convfix.is_enabled("cpu")
        with pytest.raises(KeyError), torch_convfix.disabled("cpu"):
            raise KeyError
        assert torch_convfix.is_enabled("cpu")
    assert not torch_convfix.is_enabled("cpu")


def test_status(cpu_disabled):
    with torch_convfix.enabled("cpu"):
        status = torch_convfix.status()
    assert status.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "cpu" in status.options
    registrations = [r for r in status.registrations if r.device == "cpu"]
    keys = {r.dispatch_key for r in registrations}
    assert keys == {"AutogradCPU", "FuncTorchBatched"}
    assert {DOUBLE_BACKWARD, "hardsigmoid_backward"} <= {r.operator for r in registrations}
    for word in ("AutogradCPU", DOUBLE_BACKWARD, torch.__version__.split("+")[0]):
        assert word in str(status)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpv"}, "device must be xla, cpu, cuda, tpu or .*got tpv"),
        ({"device": "cpu", "output_padding": "cut"}, "output_padding must be one of native, pad"),
        (
            {"device": "cpu", "hardware": "gpu"},
            "hardware must be one of cpu, tpu, other, got 'gpu'",
        ),
        ({"device": "meta"}, "device must be xla, cpu, cuda, tpu or .*got meta"),
        ({"device": "cpu", "output_padding": ["pad"]}, r"output_padding must be .*got \['pad'\]"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        torch_convfix.enable(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch_convfix.enable(None), "device must be a string.*got None"),
        (lambda: torch_convfix.disable(None), "device must be a string.*got None"),
        (lambda: torch_convfix.is_enabled(torch.device("cpu")), "device must be a string"),
        (
            lambda: torch_convfix.enable("cpu", derivatives="no"),
            "derivatives must be True or False",
        ),
        (lambda: torch_convfix.enable("cpu", dynamic=1), "dynamic must be True or False, got 1"),
    ],
)
def test_refuses_other_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_refuses_a_stack_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="device 'xla' needs torch_xla, which is not installed"):
        torch_convfix.enable("xla")


def test_many_threads_enable_and_disable(cpu_disabled):
    def work():
        for _ in range(50):
            torch_convfix.enable("cpu")
            torch_convfix.disable("cpu")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch_convfix.is_enabled("cpu")


@pytest.mark.slow
def test_nothing_is_printed():
    """Beyond what importing the stacks prints."""
    stacks = "import importlib.util as u, torch\n" + "".join(
        f"u.find_spec('{s}') and __import__('{s}')\n" for s in ("torch_xla", "torch_tpu")
    )
    ours = stacks + (
        "import torch_convfix as t\n"
        "for d in ['cpu', 'cuda', *t.status().options]:\n"
        "    t.enable(d); t.disable(d); t.enable(d)\n"
    )
    own_lines = set(run(stacks, PYTHONWARNINGS="ignore::UserWarning:torch_tpu").stderr.splitlines())

    def new(code: str) -> list[str]:
        result = run(code, PYTHONWARNINGS="ignore::UserWarning:torch_tpu")
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        # absl's lines start with their time
        return [line for line in lines if line not in own_lines and not line.startswith("I0000")]

    assert new(ours) == []


def test_environment_variable_imports_without_enabling():
    code = (
        "import torch_convfix as t; s = t.status(); "
        "print(s.registrations, s.options, s.compilation)"
    )
    assert run(code, TORCH_CONVFIX="0").stdout.strip() == "[] {} None"


def test_any_privateuse1_name():
    code = (
        "import torch, torch_convfix as t\n"
        "torch.utils.rename_privateuse1_backend('chip')\n"
        "t.enable('chip')\n"
        "chip = [r for r in t.status().registrations if r.device == 'chip']\n"
        "print(chip[0].dispatch_key, *[r.operator for r in chip])"
    )
    out = run(code, TORCH_CONVFIX="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout
    key, *operators = out.split()
    assert key == "AutogradPrivateUse1"
    assert {DOUBLE_BACKWARD, "hardsigmoid_backward"} <= set(operators)


def test_another_torch_is_refused_in_one_sentence():
    code = (
        "import torch; torch.__version__ = '1.0.0'\n"
        "try:\n    import torch_convfix\n"
        "except ImportError as error: print(error)"
    )
    out = run(code).stdout.strip()
    assert "\n" not in out
    assert "found torch 1.0.0" in out
    assert "pip install" in out
