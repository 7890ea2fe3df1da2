"""Every code block of README and docs runs: sybil.

The blocks of a page run in order, in one process, namespace and folder. A Python block whose first line is
``# name.py`` is a file for the blocks after it. Shell blocks must exit with 0. What is left out says why:
``<!-- skip: next, reason -->``.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run_python(example: Example) -> None:
    first = example.parsed.splitlines()[0]
    if first.startswith("# ") and first.endswith(".py"):
        pathlib.Path(first.removeprefix("# ")).write_text(example.parsed)
        return
    code = compile(example.parsed, f"{example.path}:{example.line}", "exec")
    exec(code, example.namespace)


def run_shell(example: Example) -> None:
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-eu", "-c", example.parsed],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"{example.parsed}\n{ran.stdout}{ran.stderr}"


SYBIL = Sybil(
    [CodeBlockParser("python", run_python), CodeBlockParser("sh", run_shell), SkipParser()]
)


def blocks(page: pathlib.Path) -> list[Example]:
    return list(SYBIL.parse(page))


def run_page(page: pathlib.Path, folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, __file__, str(page)], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_page(page, tmp_path):
    ran = run_page(page, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("block", ["```python\nassert False\n```\n", "```sh\nfalse\n```\n"])
def test_a_block_that_fails_is_seen(block, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(block)
    ran = run_page(page, tmp_path)
    assert ran.returncode == 1 and "AssertionError" in ran.stderr


if __name__ == "__main__":
    for example in blocks(pathlib.Path(sys.argv[1])):
        example.evaluate()
