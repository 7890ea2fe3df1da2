"""The reports for upstream: what scripts/make_reports writes, with programs that show the fault and that ours mends."""

import contextlib
import importlib.util
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

import torch_convfix

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/make_reports"
reports = SourceFileLoader("make_reports", str(SCRIPT)).load_module()
NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
# PyTorch's faults are shown where torch is the one that the reports' outputs are of.
STACKS = {s for s in reports.DEVICES if importlib.util.find_spec(s)}
STACKS |= {"pytorch"} if torch.__version__.startswith("2.9.") else set()
HERE = [f for f in reports.faults() if f["stack"] in STACKS]


def identify(fault) -> str:
    return f"{fault['stack']}-{fault['name']}"


def test_the_files_are_what_the_script_writes():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_stale_file_is_seen(tmp_path, monkeypatch, capsys):
    page = tmp_path / "ledger.md"
    page.write_text(reports.LEDGER.read_text().replace("| max_pool2d | order 2 |", "| max_pool2d | order 1 |"))  # fmt: skip
    monkeypatch.setattr(reports, "LEDGER", page)
    monkeypatch.setattr(reports, "ROOT", tmp_path)
    (tmp_path / "upstream").mkdir()
    (tmp_path / "upstream/ledger.toml").write_text((ROOT / "upstream/ledger.toml").read_text())
    monkeypatch.setattr(sys, "argv", ["make_reports", "--check"])
    assert reports.main() == 1
    said = capsys.readouterr().err
    assert "ledger.md is not what make_reports writes" in said
    assert "its program was not run" in said


@pytest.mark.parametrize("fault", reports.faults(), ids=identify)
def test_where_it_is_mended_there_is_a_file(fault):
    assert (ROOT / fault["where"]).is_file()


def test_the_faq_has_every_message():
    asked = (ROOT / "docs/faq.md").read_text()
    messages = [fault["raises"] for fault in reports.faults() if "raises" in fault]
    assert messages
    assert not [message for message in messages if f"`{message}`" not in asked]


# Of the pinned versions stock shows what it did when the report was written (`make_reports --again` runs
# them all): one of each stack, for the script's sake.
@pytest.mark.slow
# Its output is a signal where the process ends: test_ours_does_not runs those in a process.
@pytest.mark.parametrize(
    "fault", {f["stack"]: f for f in HERE if "ends" not in f}.values(), ids=identify
)
def test_stock_shows_it(fault):
    printed, verdict = reports.run(fault, sys.executable)
    assert reports.shows(fault, verdict), f"mended upstream: say so ({verdict})"
    kept = reports.kept_output(fault)
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", kept)
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (printed, kept)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("fault", HERE, ids=identify)
def test_ours_does_not(fault, tmp_path, monkeypatch, capsys):
    program = tmp_path / "program.py"
    program.write_text(reports.program(fault))
    names = ",".join(reports.names(fault))
    monkeypatch.setattr(sys, "argv", ["-c", str(program), fault["stack"], "ours", names])
    pytorchs = fault["stack"] == "pytorch"  # restored after it: the driver enables the CPU
    with torch_convfix.enabled("cpu") if pytorchs else contextlib.nullcontext():
        if fault.get("ours") == "raises":
            with pytest.raises(RuntimeError):
                exec(reports.DRIVER, {})
            return
        exec(reports.DRIVER, {})
    last = capsys.readouterr().out.rstrip().splitlines()[-1:]
    assert last != ["DIFFERENT"]
    assert last == ["SAME"] or {"ends", "raises"} & set(fault)
