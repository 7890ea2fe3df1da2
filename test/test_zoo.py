"""The zoo's own logic: what a row says, deaths, what is kept. Its rows are run by scripts/zoo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "zoo"))

pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))

import member
import run

from torch_convfix.verify.devices import Device


class _Cube(torch.autograd.Function):
    """x ** 3, whose gradient drops its derivative on one of the devices only."""

    broken = False

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * (x.detach() if _Cube.broken else x) ** 2


class _Broken(Device):
    def run(self, body, tensors):
        _Cube.broken = True
        try:
            return super().run(body, tensors)
        finally:
            _Cube.broken = False


def _steps(**functions):
    return {row: lambda f=f: f for row, f in functions.items()}


def _gradient(tensors):
    (x,) = tensors
    return {"x": torch.autograd.grad(_Cube.apply(x).sum(), x)[0]}


def _penalty(tensors):
    (x,) = tensors
    (g,) = torch.autograd.grad(_Cube.apply(x).sum(), x, create_graph=True)
    return {"x": torch.autograd.grad(g.square().sum() + x.sum(), x)[0]}


def _refused(tensors):
    raise NotImplementedError("not on the CPU")


def _missing(tensors):
    import no_such_library  # noqa: F401


def _refused_on_device(tensors):
    if _Cube.broken:
        raise ValueError("not here")
    return {"x": tensors[0].detach()}


def _zero(tensors):
    return {"x": torch.zeros_like(tensors[0])}


def test_every_verdict_of_a_row():
    x = torch.tensor([0.5, -1.5]).requires_grad_()
    steps = _steps(a=_gradient, b=_penalty, c=_refused, d=_refused_on_device, e=_zero, f=_missing)
    rows = {row.row: row for row in member.compare(steps, [x], _Broken("cpu"))}
    assert {r: row.verdict for r, row in rows.items()} == {
        "a": member.RIGHT, "b": member.WRONG, "c": member.CPU_TOO,
        "d": member.RAISES, "e": member.WRONG, "f": member.NOT_INSTALLED,
    }  # fmt: skip
    assert rows["b"].error > 0.1 and rows["d"].detail == "ValueError: not here"
    right = member.compare(_steps(b=_penalty), [x], Device("cpu"))
    assert [row.verdict for row in right] == [member.RIGHT]


def _run_program(tmp_path, text, **limits):
    program = tmp_path / "program.py"
    program.write_text(
        f"import json, os, sys, time\nfile, rows = sys.argv[4], sys.argv[5:]\n{text}"
    )
    options = {"limit": 60.0, "memory": 2**30, **limits}
    rows = run.rows_of("resnet18")
    return run.run_member("resnet18", rows, "cpu", "ours", program=program, **options)


def test_a_death_is_a_row_and_the_others_are_run_alone(tmp_path):
    found = _run_program(
        tmp_path,
        "if 'MAML' in rows: os.abort()\n"
        "open(file, 'a').writelines(json.dumps(dict(row=r, verdict='right')) + '\\n' for r in rows)",
    )
    assert [row["verdict"] for row in found] == ["right"] * 5 + [member.DIES]
    assert "SIGABRT" in found[-1]["detail"]


@pytest.mark.parametrize(
    "text, limits",
    [
        ("while True: pass", {"limit": 0.05}),
        ("kept = b'x' * 2**28; time.sleep(60)", {"memory": 2**26}),
    ],
)
def test_a_limit_ends_a_row(tmp_path, text, limits):
    found = _run_program(tmp_path, text, **limits)
    assert {row["verdict"] for row in found} == {member.DIES}
    assert all("limit" in row["detail"] for row in found)


def _zoo(monkeypatch, tmp_path, *arguments):
    ran = []

    def fake(name, rows, device, kernels, limit, memory):
        ran.append(name)
        verdict = member.WRONG if name == "vgg11" else member.RIGHT
        return [{"row": r, "verdict": verdict, "error": 0.0, "detail": ""} for r in rows]

    monkeypatch.setattr(run, "run_member", fake)
    code = run.main(["--json", str(tmp_path / "zoo.json"), *arguments])
    return code, ran


def test_only_and_resume(monkeypatch, tmp_path):
    assert _zoo(monkeypatch, tmp_path, "--only", "vgg*") == (1, ["vgg11"])
    assert _zoo(monkeypatch, tmp_path, "--only", "resnet*")[0] == 0
    _, ran = _zoo(monkeypatch, tmp_path, "--resume")
    assert "vgg11" in ran and not any(name.startswith("resnet") for name in ran)
    kept = json.loads((tmp_path / "zoo.json").read_text())["members"]
    assert list(kept) == list(run.MEMBERS)
    assert _zoo(monkeypatch, tmp_path, "--resume", "--only", "resnet18") == (0, [])
    again = json.loads((tmp_path / "zoo.json").read_text())["members"]
    assert again == kept and again["vgg11"][0]["verdict"] == member.WRONG
    _, ran = _zoo(monkeypatch, tmp_path, "--quick")
    assert ran == list(run.QUICK)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--only", "no such"], "--only must match a member"),
        (["--cpu-limit", "0"], "must be a number above 0, got '0'"),
        (["--json", "no/such/folder/file"], "no folder for"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, said):
    env = {**os.environ, "TORCH_CONVFIX": "0"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "zoo/run.py"), *arguments],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_only_the_known_refusal_of_a_library_is_none_of_ours():
    row = member.Row("call", member.RAISES, detail="Found parameters in un-supported layers.")
    judge = member._judged
    assert judge(row, "curvlinops, KFAC", "xla").verdict == member.REFUSED
    assert judge(row, "curvlinops, KFAC", "tpu").verdict == member.RAISES
    assert judge(row, "curvlinops, GGN", "xla").verdict == member.RAISES
    other = member.Row("call", member.RAISES, detail="another error")
    assert judge(other, "curvlinops, KFAC", "xla").verdict == member.RAISES
    assert member.REFUSED in member.NO_FAULT and member.NOT_INSTALLED not in member.NO_FAULT


def test_the_page_shows_stock_beside_ours(tmp_path):
    for kernels, verdict in (("stock", member.RAISES), ("ours", member.RIGHT)):
        row = {"row": "R1 penalty", "verdict": verdict, "error": 0.0, "detail": ""}
        members = {
            "resnet18": [row | {"detail": "ValueError: shapes"}] if kernels == "stock" else [row]
        }
        report = {"versions": {"torch": "2.9.0"}, "members": members}
        (tmp_path / f"torch_xla-{kernels}.json").write_text(json.dumps(report))
    assert run.page.write(tmp_path, tmp_path / "zoo.md", run.MEMBERS) == 0
    text = (tmp_path / "zoo.md").read_text()
    dashes = " | ".join(["\u2013"] * 2)
    assert f"| resnet18 | {dashes} | stock: raises; ours: right |" in text
    assert "- `ValueError: shapes`: stock, resnet18, R1 penalty" in text
