"""scripts/wheels keeps the README's cells that it does not try again, and refuses what is no clean wheel."""

import importlib.machinery
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def wheels():
    loader = importlib.machinery.SourceFileLoader("wheels", str(ROOT / "scripts/wheels"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("wheels", loader))
    loader.exec_module(module)
    return module


def _main(wheels, monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["wheels", *arguments])
    return wheels.main()


def test_the_readme_has_a_cell_for_each_python_and_torch(wheels):
    text = (ROOT / "README.md").read_text()
    table = text.split(wheels.BEGIN)[1].split(wheels.END)[0]
    cells = wheels.cells_of(table)
    assert set(cells) == {(p, t) for p in wheels.PYTHONS for t in wheels.TORCHES}
    assert wheels.table(cells) == table


def test_only_the_cells_that_were_tried_are_replaced(wheels, monkeypatch, tmp_path):
    readme = tmp_path / "README.md"
    kept = {("3.11", t): f"kept {t.split(',')[0]}" for t in wheels.TORCHES}
    readme.write_text(f"above\n{wheels.BEGIN}{wheels.table(kept)}{wheels.END}\nbelow\n")
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    monkeypatch.setattr(wheels, "cell", lambda at, python, *_: f"right on {python}")
    assert _main(wheels, monkeypatch, "--readme", "--python", "3.12", "--torch", "newest*") == 0
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n")
    want = {(p, t): kept.get((p, t), "not tried") for p in wheels.PYTHONS for t in wheels.TORCHES}
    assert wheels.cells_of(text) == want | {("3.12", "newest torch"): "right on 3.12"}


@pytest.mark.parametrize(("says", "code"), [("no such torch for it", 0), ("does not build", 1)])
def test_a_torch_that_there_is_must_work(wheels, monkeypatch, says, code, capsys):
    def fails(*_):
        raise wheels.Failed(says)

    monkeypatch.setattr(wheels, "cell", fails)
    assert _main(wheels, monkeypatch, "--python", "3.13", "--torch", "newest*") == code
    assert f"CPython 3.13, newest torch: {says}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "size", "said"),
    [
        (["torch_convfix/_C.so"], 6_000_000, "6000"),
        (["torch_convfix/_C.so", "torch_convfix.libs/libfoo.so"], 9, "links what is not torch's"),
    ],
)
def test_a_wheel_that_is_large_or_brings_libraries_is_refused(
    wheels, monkeypatch, tmp_path, names, size, said
):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/own.whl").touch()
    (tmp_path / "wheel").mkdir()
    with zipfile.ZipFile(tmp_path / "wheel/own-1-x.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, bytes(size))
    monkeypatch.setattr(wheels, "environment", lambda at, *_: at / "bin/python")
    monkeypatch.setattr(wheels, "run", lambda *_, **__: "2.9.0\n")
    with pytest.raises(wheels.Failed, match=said):
        wheels.cell(tmp_path, "3.11", [], (), tmp_path / "out")
