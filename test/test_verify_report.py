"""How verify tells what it found: its reports, and its command."""

import io
import json
import math
import os
import subprocess
import sys

import pytest
from rich.console import Console

from torch_convfix.commands import cli
from torch_convfix.verify.findings import Finding, Kind
from torch_convfix.verify.report import Comparison, Environment, Report, error_text


@pytest.mark.slow
def test_the_command_finds_a_wrong_backend(tmp_path):
    def verify(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
        report = tmp_path / "report.json"
        return subprocess.run(
            [
                sys.executable, "-m", "torch_convfix", "verify", "--device", "cpu", "--cases", "5",
                "--only", "nn.functional.conv2d", "--jobs", "1", "--json", report, *options,
            ],
            env={**os.environ, **env, "PYTHONPATH": os.path.dirname(__file__)},
            capture_output=True, text=True,
        )  # fmt: skip

    assert verify().returncode == 0
    done = verify("--import", "wrong_kernels", "--stock", CONVFIX_MUTATION="W, sign")
    assert done.returncode == 1, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    (finding,) = (f for f in report["findings"] if f["kind"] == "wrong")
    assert (finding["op"], finding["fault"]) == ("nn.functional.conv2d", "order 1")
    assert "tensor(1, 1, 1, 1)" in finding["line"]  # shrunk


def some_report(count: int) -> Report:
    findings = [
        Finding(
            f"nn.functional.operator_{i}", Kind.CRASH if i % 20 == 7 else Kind.WRONG,
            "SIGFPE" if i % 20 == 7 else "order 2", {"order 2": 10.0 ** (i % 5 - 4)}, 3,
            "import torch; check('nn.functional.conv2d', <script>)",
        )
        for i in range(count)
    ]  # fmt: skip
    environment = Environment("xla", "stock", "float64", "x86_64", {"torch": "2.9.0"}, True)
    errors = {f.op: {"value": 0.0, "order 1": 1e-16, **f.stages} for f in findings}
    errors["nn.functional.relu"] = {"value": 0.0, "order 1": 1e-16, "order 2": 1e-15}
    return Report(environment, 100, 99, findings, errors=errors)


@pytest.mark.parametrize("count", [0, 1, 60])
def test_a_report_of_any_length(count: int):
    report = some_report(count)
    assert report.ok == (count == 0)
    text, page = str(report), report.to_html()
    assert text.count(" operator_") == count
    assert text.count("check('nn.functional.conv2d', <script>)\n") == count  # on one line
    assert page.count('class="op">nn.functional.operator_') == count
    assert "<script>" not in page and "http-equiv" not in page  # escaped, and nothing is loaded
    assert page.count("<svg") == 1
    assert len(json.loads(report.to_json())["findings"]) == count


def test_stock_beside_ours_in_every_form():
    stock, ours = some_report(40), some_report(0)
    ours.cases, ours.skipped = 109, {"nn.functional.dropout: random": 7}
    longest = "nn.functional.binary_cross_entropy_with_logits"
    stock.findings.append(Finding(longest, Kind.WRONG, "value", {"value": 33.0}, 1, "a line"))
    both = Comparison(stock, ours)
    assert both.ok and not Comparison(ours, stock).ok  # ours decides

    console = Console(width=80, file=io.StringIO())  # as when piped
    both.print(console)
    text = console.file.getvalue()
    names = [f.op.removeprefix("nn.functional.") for f in stock.findings]
    assert all(f"│ {name} " in text for name in names)
    assert "7 cases skipped, random ones of: nn.functional.dropout; 3 without numbers" in text

    assert json.loads(both.to_json()) == {
        "stock": json.loads(stock.to_json()), "ours": json.loads(ours.to_json())
    }  # fmt: skip
    page = both.to_html()
    assert page.count("<svg") == page.count("<section>") == 2
    assert page.count(f'<td class="op">{longest}</td>') == 2  # beside ours, and of stock's faults
    assert stock.summary() in page and ours.summary() in page


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (math.inf, "not finite"), (0.0, "-"), (1e-3, "1e-03"), (0.43, "43%"), (33.2, "33 times"),
        (2e6, "2e+06"),
    ],
)  # fmt: skip
def test_an_error_in_a_few_characters(error: float, text: str):
    assert error_text(error) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "foo"], "got foo"),
        (["--device", "cpu", "--dtype", "float33"], "'float33'"),
        (["--device", "cpu", "--only", "nothing"], "'nothing'"),
    ],
)
def test_what_cannot_start_is_refused_in_a_sentence(options, said, capfd):
    with pytest.raises(SystemExit, match=r"^2$"):  # as the console script ends, and argparse
        sys.exit(cli.main(["verify", *options]))
    err = capfd.readouterr().err
    assert said in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize(
    ("missing", "options"),
    [(["expecttest"], []), (["numpy"], []), (["jinja2"], ["--html", "page"]), (["torch_xla", "torch_tpu"], [])],
)  # fmt: skip
def test_what_is_not_installed_is_named(missing, options, capsys, monkeypatch):
    for package in missing:
        monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["verify", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(package in line for package in missing)


@pytest.mark.slow
def test_a_fault_of_a_sweep_is_not_taken_for_a_refusal(monkeypatch):
    def raises(*args: object) -> None:
        raise ValueError("of the sweep")

    monkeypatch.setattr("torch_convfix.verify.sweep._Sweep._in_workers", raises)
    with pytest.raises(ValueError, match="of the sweep"):
        cli.main(["verify", "--device", "cpu", "--only", "nn.functional.celu"])


@pytest.mark.slow
def test_the_command_compares_and_tells_its_progress(tmp_path, capfd):
    page, report = tmp_path / "page.html", tmp_path / "report.json"
    options = ["--device", "cpu", "--only", "nn.functional.celu", "--jobs", "1", "--compare"]
    assert cli.main(["verify", *options, "--json", str(report), "--html", str(page)]) == 0
    named = [r["environment"]["kernels"] for r in json.loads(report.read_text()).values()]
    assert named == ["stock", "torch_convfix"]
    assert page.read_text().count("<section>") == 2
    out, err = capfd.readouterr()
    assert "stock: no fault" in out and "ours: no fault" in out
    assert "stock: 6 of 6 cases, nn.functional.celu" in err
    assert "ours: 6 of 6 cases, nn.functional.celu" in err


def test_a_sweep_that_compares_nothing_is_not_a_success():
    assert not Report(some_report(0).environment, 10, 0, []).ok
