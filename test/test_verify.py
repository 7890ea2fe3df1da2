"""What verify finds, and how it tells it."""

import json
import math
import os
import signal
from random import Random

import pytest
import torch
import wrong_kernels
import wrong_rules

from torch_convfix.verify import check, conv_cases, tensor
from torch_convfix.verify.compare import Outcome, compare
from torch_convfix.verify.derivatives import AFTER_A_WRITE, Call, Failure, all_stages
from torch_convfix.verify.devices import Device, kernels
from torch_convfix.verify.findings import Kind
from torch_convfix.verify.module_cases import ModuleCase, module_cases
from torch_convfix.verify.op_cases import OpCase, op_cases
from torch_convfix.verify.report import Report
from torch_convfix.verify.results import kind_and_fault
from torch_convfix.verify.spelling import Unspellable, spell
from torch_convfix.verify.sweep import CannotStart, run
from torch_convfix.verify.workers import Death, Settings, Worker, worker

CPU = Device("cpu")


def in_two_dimensions() -> list[conv_cases.ConvCase]:
    return [c for c in conv_cases.declared() if len(c.size) == 2 and not c.must_raise]


def wrong_cases(stages: list[str]) -> list[tuple[conv_cases.ConvCase, Outcome]]:
    results = [(c, compare(c.call(), CPU, stages, torch.float64)) for c in in_two_dimensions()]
    return [(c, outcome) for c, outcome in results if outcome.wrong]


QUICK = ("F, flipped kernel", "I, sign", "W, bias", "double backward, swapped groups")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in wrong_kernels.MUTATIONS
    ],
)
def test_a_wrong_kernel_is_found(name: str):
    stages = all_stages(2, composed=0, batched=0)  # where it is wrong first, it is in these
    with wrong_kernels.registered(name):
        found = wrong_cases(stages)
    which, fault = wrong_kernels.MUTATIONS[name]
    first = {"F": "value", "I": "order 1", "W": "order 1", "double backward": "order 2"}[which]
    # Never before the order that first uses the kernel; later only where the stock double backward
    # calls it in another geometry.
    assert min((outcome.fault() for _, outcome in found), key=stages.index) == first
    if fault == wrong_kernels.GROUPS:
        assert all(case.groups > 1 for case, outcome in found if outcome.fault() == first)


def test_the_cpu_as_it_is_has_no_wrong_case():
    assert wrong_cases(all_stages(2)) == []


def test_shrinking_keeps_the_fault_and_drops_the_rest():
    def fails(case: conv_cases.ConvCase) -> bool:
        return case.groups > 1 and case.stride[0] > 1

    drawn, cases = Random(0), []
    while len(cases) < 5:
        case = conv_cases.draw(drawn)
        cases += [case] if fails(case) else []
    for case in cases:
        small = conv_cases.shrink(case, fails)
        assert fails(small) and small.valid()
        dim = len(case.size)
        ones = (1,) * dim
        assert (small.groups, small.size, small.kernel, small.batch) == (2, ones, ones, 1)
        assert small.stride == (2, *ones[1:])


def test_random_cases_are_valid_and_the_same_for_a_seed():
    first, second = ([conv_cases.draw(r) for _ in range(50)] for r in (Random(3), Random(3)))
    assert first == second
    for case in first:
        call = case.call()
        assert torch.allclose(call.fn(*call.args), call.reference(*call.args), rtol=1e-9, atol=1e-9)


def test_a_dropped_term_is_an_error_and_a_random_call_is_skipped():
    dropped = compare(
        Call(lambda x: x.detach() * x, (tensor(3),), reference=lambda x: x * x),
        CPU, all_stages(2), torch.float64,
    )  # fmt: skip
    assert dropped.fault() == "order 1"
    assert dropped.errors["value"] == 0
    random = compare(Call(torch.dropout, (tensor(9), 0.5, True)), CPU, all_stages(1), torch.float32)
    assert random.skipped == "random"


@pytest.mark.parametrize("got", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong(got: float):
    call = Call(lambda x: x * got, (tensor(3),), reference=lambda x: x)
    assert compare(call, CPU, ["value"], torch.float64).errors == {"value": math.inf}


def test_outside_of_its_domain_a_function_has_no_derivative():
    x = torch.tensor([-1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def zero_there(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, x.detach()).sqrt()

    def wrong_elsewhere(x: torch.Tensor) -> torch.Tensor:
        return zero_there(x) + (x - x.detach())

    for function, fault in ((zero_there, ""), (wrong_elsewhere, "order 1")):
        call = Call(function, (x,), reference=torch.sqrt)
        assert compare(call, CPU, all_stages(2), torch.float64).fault() == fault


def test_a_line_of_the_report_repeats_the_case():
    case = next(c for c in in_two_dimensions() if c.transposed and c.bias)
    with wrong_kernels.registered("F, sign"):
        outcome = eval(f"check({case.spell()}, device='cpu')", {"check": check, "tensor": tensor})
    assert outcome.fault() == "value"


def test_a_line_spells_what_is_not_finite():
    line = spell("norm", [torch.tensor([[1.0, -math.inf]]), -math.inf], {"p": (math.nan,)})
    name, x, order, p = eval(f"({line.replace('p=', '')})", {"torch": torch})
    assert (name, x.tolist(), order) == ("norm", [[1.0, -math.inf]], -math.inf)
    assert math.isnan(p[0])


class Killer:
    """A case that ends the process that runs it."""

    op = "kill"

    def stages(self, highest: int) -> list[str]:
        return all_stages(highest)

    def call(self, dtype: torch.dtype) -> Call:
        return Call(lambda: os.kill(os.getpid(), signal.SIGFPE))


@pytest.mark.slow
def test_a_death_is_a_result_and_the_next_case_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    with worker(Settings("cpu", imports=("test_verify",)), timeout=100) as own:
        death = own.run(Killer())
        assert isinstance(death, Death) and death.how == "SIGFPE"
        assert own.run(in_two_dimensions()[0]).fault() == ""


class Undrawn(Killer):
    """A case that cannot be drawn."""

    op = "undrawn"

    def call(self, dtype: torch.dtype) -> Call:
        raise RuntimeError("no such sample")


@pytest.mark.slow
def test_an_exception_about_a_case_is_a_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    with worker(Settings("cpu", imports=("test_verify",)), timeout=100) as own:
        failure = own.run(Undrawn())
        assert failure == Failure("RuntimeError: no such sample")
        assert own.run(in_two_dimensions()[0]).fault() == ""
    assert kind_and_fault(Undrawn(), failure, False) == (Kind.NOT_SWEPT, failure.line)


def test_every_stage_meets_every_operator():
    stages: dict[str, set[str]] = {}
    for case in (*conv_cases.declared(), *op_cases(torch.float64)):
        stages.setdefault(case.op, set()).update(case.stages(2))
    assert len(stages) > 150
    assert {op for op, met in stages.items() if not met.issuperset(all_stages(2))} == set()
    assert stages["nn.functional.conv1d"] == {*all_stages(3, composed=3, batched=3)}


def test_what_has_no_literal_is_spelled_as_its_case():
    case = next(iter(op_cases(torch.float64, all_ops=True, only="sparse.mm")))
    spelled = case.spell(torch.float64, redraw=False)
    assert eval(spelled, {"OpCase": OpCase}) == case
    with pytest.raises(Unspellable, match="layout"):
        spell("sum", [torch.eye(2).to_sparse()], {})


@pytest.mark.parametrize(
    "stage", ["", "order 2", "forward over reverse", "reverse over forward", "forward over forward"]
)
def test_a_rule_that_one_composition_alone_uses(stage: str):
    call = Call(wrong_rules.cube(stage), (tensor(3),), reference=lambda x: x**3)
    outcome = compare(call, CPU, all_stages(2), torch.float64)
    assert not outcome.raised
    # And with vmap around it; the Hessian is forward over reverse along several directions.
    names = {stage.replace("order 2", "reverse over reverse"), stage} if stage else set()
    names |= {"Hessian"} if stage == "forward over reverse" else set()
    with_vmap = {w for w in outcome.wrong if "vmap" in w or AFTER_A_WRITE in w}
    assert {*outcome.wrong} - with_vmap == names
    assert bool(with_vmap) == bool(stage)


def test_what_is_wrong_after_a_write_alone_is_found():
    def stale(x: torch.Tensor) -> torch.Tensor:
        return x * (x if x._base is None else x.detach())

    def refuses(x: torch.Tensor) -> torch.Tensor:
        if x._base is not None:
            raise ValueError("a view")
        return x * x

    outcome = compare(Call(stale, (tensor(2, 3),)), CPU, all_stages(2), torch.float64)
    assert [*outcome.wrong] == ["order 1 after a write", "order 2 after a write"]
    call = Call(refuses, (tensor(2, 3),), reference=lambda x: x * x)
    outcome = compare(call, CPU, all_stages(2), torch.float64)
    case = OpCase("square", "", 0, 6)
    assert kind_and_fault(case, outcome, False) == (Kind.RAISES, "value after a write")


def test_what_is_wrong_by_one_input_alone_is_found():
    def forgets(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * (y if x.requires_grad else y.detach())

    call = Call(forgets, (tensor(3), tensor(3, seed=1)), reference=lambda x, y: x * y)
    outcome = compare(call, CPU, all_stages(2), torch.float64)
    by_autograd = {
        stage: worst for stage, worst in outcome.wrong.items() if stage.startswith("order")
    }
    assert by_autograd == {
        "order 1 of one alone": "input 1 (input 1 alone)",
        "order 2 of one alone": by_autograd["order 2 of one alone"],
    }


def test_modules_in_training_and_evaluation_are_compared():
    cases = list(module_cases(torch.float64, only="nn.BatchNorm2d"))
    assert {case.training for case in cases} == {True, False}
    for case in cases[:: len(cases) - 1]:
        with kernels("cpu", stock=False):  # PyTorch's own batch norm is wrong after forward mode
            outcome = compare(case.call(torch.float64), CPU, case.stages(2), torch.float64)
        assert not outcome.fault() and outcome.errors["order 2"] < 1e-12
        assert eval(case.spell(torch.float64, redraw=False), {"ModuleCase": ModuleCase}) == case


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch):
    kept: list[Report] = []

    def interrupt(done: int, of: int, op: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    options = {"only": "nn.functional.celu", "jobs": 1}
    with pytest.raises(KeyboardInterrupt):
        run("cpu", progress=interrupt, keep=kept.append, **options)
    part = json.loads(kept[-1].to_json())
    assert not kept[-1].ok and (part["cases"], len(part["rows"])) == (3, 3) and part["planned"] > 3

    ran: list[object] = []
    of_a_worker = Worker.run
    monkeypatch.setattr(Worker, "run", lambda w, c: ran.append(c) or of_a_worker(w, c))
    report = run("cpu", resume=part, **options)
    assert report.ok and report.cases == part["planned"] == 3 + len(ran)
    assert report.rows[:3] == part["rows"]
    again = run("cpu", resume=json.loads(report.to_json()), **options)
    assert again.rows == report.rows and report.cases == 3 + len(ran)
    with pytest.raises(CannotStart, match="dtype"):
        run("cpu", resume=part, dtype="float64", **options)


def test_a_worker_that_does_not_start_says_why():
    settings = Settings("cpu", imports=("no_such_module",))
    with (
        worker(settings, timeout=100) as own,
        pytest.raises(RuntimeError, match="no_such_module"),
    ):
        own.start()


@pytest.mark.slow
def test_the_cpu_is_clean():
    report = run("cpu", cases=20)
    assert report.ok, str(report)
    assert report.compared > 900
    assert report.artefacts == []
