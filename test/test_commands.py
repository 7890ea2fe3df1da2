"""The command line as a whole: options are spelled and told alike everywhere, exit codes are those told."""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program_options import as_rows

from torch_convfix.commands import _options, cli

ROOT = Path(__file__).resolve().parents[1]


def _programs() -> list[str]:
    files = [
        f for d in ("bench", "examples", "scripts", "zoo") for f in sorted((ROOT / d).iterdir())
    ]
    found = [f for f in files if f.is_file() and f.suffix in ("", ".py")]
    return [str(f) for f in found if re.search(r"parse_args\(", f.read_text())]


@pytest.fixture(scope="module")
def options() -> dict[str, list[dict]]:
    """Those of every program that runs with what is installed, and of every command."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "test/program_options.py"), *_programs()],
        env={**os.environ, "TORCH_CONVFIX": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = {k: v for k, v in json.loads(done.stdout.splitlines()[-1]).items() if v is not None}
    (commands,) = (
        action.choices
        for action in cli.every_command()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return found | {name: as_rows(parser) for name, parser in commands.items()}


def test_an_option_of_two_commands_is_a_shared_one_and_told_alike(options):
    assert {"verify", "audit", "tpu", "status"} < options.keys() and len(options) > 12
    seen: dict[str, str] = {}
    for program, rows in options.items():
        for row in rows:
            if (name := row["name"]) not in _options.SHARED:
                assert name not in seen, f"{name} of {program} and {seen[name]} is not shared"
                seen[name] = program
                continue
            shared = _options.SHARED[name]
            told = re.escape(shared["help"]).replace(re.escape("{of}"), ".*")
            assert re.fullmatch(told, row["help"]), (program, row)
            if "metavar" in shared:
                assert row["takes"] == shared["metavar"], (program, row)
            elif "choices" in shared:
                assert set(shared["choices"]) <= set(row["takes"]), (program, row)


def test_one_meaning_has_one_name(options):
    names: dict[str, str] = {}
    for program, rows in options.items():
        for row in rows:
            text = row["help"]
            if row["name"] in _options.SHARED:
                text = _options.SHARED[row["name"]]["help"]
            assert text, f"{row['name']} of {program} is not told"
            assert names.setdefault(text, row["name"]) == row["name"], (program, row)
    for name in names.values():
        assert f"{name}s" not in names.values(), f"{name} has a plural"


def test_the_dtypes_are_those_that_have_a_tolerance():
    from torch_convfix.verify.compare import TOLERANCES

    assert [f"torch.{name}" for name in _options.DTYPES] == list(map(str, TOLERANCES))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["prove"], "'prove'"),
        (["verify", "--orders", "2"], "--orders"),
        (["verify", "--jobs", "0"], "--jobs: must be a whole number, 1 or more, got '0'"),
        (["audit", "m:f", "--order", "-1"], "--order: must be a whole number, 0 or more, got '-1'"),
        (["tpu", "m:f", "--limit", "soon"], "--limit: must be a number above 0, got 'soon'"),
        (["verify", "--dtype", "float33"], "'float33'"),
    ],
)
def test_a_misspelled_command_ends_with_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "interrupted",
    [
        ["status"],
        ["audit", f"{ROOT / 'test/test_commands.py'}:right", "--device", "cpu"],
        ["completion", "bash"],
    ],
)
def test_an_interrupt_ends_any_command_with_130(interrupted, monkeypatch, capsys):
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"torch_convfix.commands.{interrupted[0]}.main", interrupt)
    assert cli.main(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


class _HalfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g


def right(x):
    return (x * x).sum()


def wrong(x):
    return _HalfTheGradient.apply(x).sum()


_NET = torch.nn.Linear(3, 3)


def closes_over(x):
    return _NET(x).square().sum()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "1000000x1000000x1000"], "input must fit into memory, got '1000000x"),
        (["--input", "10000000000000000x1000000x1000"], "input must fit into memory"),
        (["--input", "3", "--json", "{folder}"], "is a folder"),
        (["--input", "3", "--json", "/proc/no.json"], "/proc/no.json cannot be written: "),
    ],
)
def test_what_cannot_be_is_told_in_one_line(arguments, said, capsys, tmp_path):
    arguments = [a.format(folder=tmp_path) for a in arguments]
    name = "tpu" if "--json" in arguments else "audit"
    assert cli.main([name, f"{Path(__file__)}:right", *arguments]) == 2
    told = capsys.readouterr()
    (line,) = (told.out + told.err).splitlines()
    assert said in line


def test_a_target_that_exits_is_told_in_one_line(capsys, tmp_path):
    file = tmp_path / "target.py"
    file.write_text("import sys\nsys.exit('no configuration')\n")
    assert cli.main(["audit", f"{file}:loss", "--input", "3", "--device", "cpu"]) == 2
    told = capsys.readouterr()
    assert told.out + told.err == f"{file}:loss raises SystemExit: no configuration\n"


def test_what_a_target_closes_over_is_asked_for_as_an_input(capsys):
    target = f"{Path(__file__)}:closes_over"
    cli.main(["audit", target, "--input", "2x3", "--device", "cpu"])
    assert "closes over keeps its dtype and its device: give such as inputs" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(("name", "code"), [("right", 0), ("wrong", 1), ("no_such", 2)])
def test_right_is_0_wrong_is_1_and_what_cannot_start_2(name, code):
    target = f"{Path(__file__)}:{name}"
    assert cli.main(["audit", target, "--input", "3", "--device", "cpu"]) == code


def test_a_step_that_cannot_be_traced_for_a_tpu_is_2(capfd):
    assert cli.main(["tpu", f"{Path(__file__)}:no_such", "--input", "3"]) == 2
    assert "must name a function" in capfd.readouterr().out


def test_the_exit_codes_are_told_by_every_command_and_in_the_documents(capsys):
    for arguments in ([], ["audit"], ["completion"], ["status"], ["tpu"], ["verify"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, "--help"])
        assert ended.value.code == 0
        words = " ".join(capsys.readouterr().out.split("exit codes: ")[1].split())
        assert words == "; ".join(f"{code} {says}" for code, says in cli.EXIT_CODES.items())
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Exit codes of every command: {words}" in readme
    table = (ROOT / "docs/verify-and-audit.md").read_text().split("## Exit codes")[1]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)] == [*cli.EXIT_CODES]


def test_who_reads_a_part_gets_no_trace():
    code = "import sys; from torch_convfix.commands import cli; sys.exit(cli.main(['status']))"
    reader = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    reader.stdout.close()
    assert "BrokenPipe" not in reader.stderr.read()
    assert reader.wait() == 0


def test_the_version(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert re.fullmatch(r"torch-convfix \d+\.\d+\.\d+.*\n", capsys.readouterr().out)
