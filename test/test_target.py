"""What commands are pointed at: functions by name, inputs by spec, modules as functions of tensors."""

import copy
import importlib

import pytest
import torch
from torch import nn
from torch.func import functional_call

from torch_convfix import _target, tpu
from torch_convfix._as_function import as_function
from torch_convfix.commands import cli
from torch_convfix.verify.audit import audit
from torch_convfix.verify.compare import compare, worst_error
from torch_convfix.verify.derivatives import Call
from torch_convfix.verify.devices import Device

HERE = __file__


def loss(x):
    return x.square().sum()


def with_inputs():
    return loss, torch.rand(2)


def with_a_list():
    return loss, [torch.rand(2)]


def lacks_a_module():
    return importlib.import_module("no_such_module")


def lacks_a_key():
    return {}["net"]


def largest(x):
    return x.argmax()


def lone():
    return torch.rand(2)


def mistaken():
    raise ValueError("my own mistake")


@pytest.mark.parametrize("name", ["with_inputs", "with_a_list"])
def test_a_function_returns_its_step_and_inputs(name):
    fn, (x,) = _target.resolve(f"{HERE}:{name}", ())
    assert fn.__name__ == "loss" and x.shape == (2,)


def test_inputs_by_spec():
    _, (x, y) = _target.resolve("operator:add", ("2x3:bfloat16", "4:int64"))
    assert x.dtype == torch.bfloat16 and x.requires_grad and x.shape == (2, 3)
    assert y.dtype == torch.int64 and not y.requires_grad


@pytest.mark.parametrize(
    ("target", "specs", "message"),
    [
        ("loss", (), "target must be module:function or file.py:function, got 'loss'"),
        ("no.py:loss", (), "target must name a file that is there, got 'no.py:loss'"),
        ("no:loss", (), r"target must name a module or a \.py file that is there, got 'no:loss'"),
        (f"{HERE}:nothing", (), "target must name a function of .*, got '.*:nothing'"),
        (f"{HERE}:mistaken", (), "mistaken raises ValueError: my own mistake"),
        (
            f"{HERE}:lacks_a_module",
            (),
            "lacks_a_module raises ModuleNotFoundError: No module named",
        ),
        (f"{HERE}:loss", (), r"loss\(x\) was given 0 inputs: missing a required argument: 'x'"),
        (f"{HERE}:loss", ("2", "2"), r"loss\(x\) was given 2 inputs: too many"),
        (f"{HERE}:lone", (), r"must return \(function, \*inputs\) .*, got Tensor"),
        (f"{HERE}:loss", ("3x",), "input must be sizes joined by x .*, got '3x'"),
        (f"{HERE}:loss", ("2:float33",), "input must be .* a dtype of torch's, .* got '2:float33'"),
    ],
)
def test_refusals(target, specs, message):
    with pytest.raises(ValueError, match=message):
        _target.resolve(target, specs)


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "no_such_module:loss", "--device", "cpu"],
        ["audit", f"{HERE}:nothing", "--device", "cpu"],
        ["audit", f"{HERE}:loss", "--input", "2,3", "--device", "cpu"],
        ["audit", f"{HERE}:loss", "--input", "2", "--device", "cpuu"],
        ["audit", f"{HERE}:lacks_a_module", "--device", "cpu"],
        ["audit", f"{HERE}:lacks_a_key", "--device", "cpu"],
        ["audit", f"{HERE}:largest", "--input", "2", "--device", "cpu"],
        ["tpu", f"{HERE}:loss", "--input", "2", "--topology", "v9"],
        ["tpu", "loss"],
        ["tpu", f"{HERE}:loss", "--input", "2,3"],
        ["tpu", f"{HERE}:loss", "--input", "2", "--html", "/no/such/folder/page.html"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, capfd):
    assert cli.main(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "Traceback" not in line


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def inner_step(net, x):
    named = dict(net.named_parameters())
    grads = torch.autograd.grad(net(x).sum(), list(named.values()), create_graph=True)
    moved = {k: p - 0.1 * g for (k, p), g in zip(named.items(), grads, strict=True)}
    return functional_call(net, moved, (x,)).square().sum()


def test_a_module_is_a_function_of_its_parameters():
    net, x = Tied().double(), torch.rand(2, 3, dtype=torch.float64)
    function, (*state, given) = as_function(inner_step, [net, x])
    named = dict(net.named_parameters())
    assert given is x
    assert list(map(id, state)) == list(map(id, named.values()))
    twice = {k: (t.detach() * 2).requires_grad_() for k, t in named.items()}
    got = function([*twice.values(), x])
    other = Tied().double()
    other.load_state_dict(twice, strict=False)
    torch.testing.assert_close(got, inner_step(other, x))
    gradients = torch.autograd.grad(got, list(twice.values()))
    want = torch.autograd.grad(inner_step(other, x), list(other.parameters()))
    torch.testing.assert_close(list(gradients), list(want))


def by_state_dict(net, x):
    return functional_call(net, {k: 2 * v for k, v in net.state_dict(keep_vars=True).items()}, (x,))


def by_slice(net, x):
    return net(x).sum() + sum(p.square().sum() for p in net[:2].parameters())


def by_buffers(net, x):
    net.train()(x)
    return net(x).sum() + sum(b.double().sum() for b in net.buffers())


def parametrized():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    return nn.Sequential(first, nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))).eval()


@pytest.mark.parametrize(
    ("fn", "net"),
    [
        (by_state_dict, nn.Sequential(nn.Linear(3, 3))),
        (by_slice, nn.Sequential(nn.Linear(3, 3), nn.ELU(), nn.Linear(3, 1))),
        (by_buffers, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
        (lambda net, x: net(x), parametrized()),
        (lambda nets, x: nets["b"](nets["a"](x)), {"a": nn.Linear(3, 3), "b": Tied()}),
    ],
)
def test_what_a_step_reaches_of_its_module(fn, net):
    net = copy.deepcopy(net)
    parts = list(net.values()) if isinstance(net, dict) else [net]
    parameters = [p for part in parts for p in part.parameters()]
    x = torch.rand(4, 3)
    function, states = as_function(fn, [net, x])
    before = [t.clone() for part in parts for t in part.buffers()]
    got = function(states)
    torch.testing.assert_close([t for part in parts for t in part.buffers()], before)
    gradients = torch.autograd.grad(got.sum(), parameters)
    want = fn(net, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients, torch.autograd.grad(want.sum(), parameters))


@pytest.mark.parametrize(
    ("fn", "inputs", "said"),
    [
        (lambda x: None, [torch.rand(2)], "not compared: it returns no tensor"),
        (lambda x: (_ for _ in ()).throw(KeyError("no")), [torch.rand(2)], "the CPU refuses it"),
        (lambda x: x * weight, [torch.rand(2)], "derivatives by 1 tensors"),
        (torch.rand_like, [torch.rand(2)], "not compared: random"),
    ],
)
def test_audit_is_not_ok_where_nothing_was_compared(fn, inputs, said):
    report = audit(fn, *inputs, device="cpu")
    assert not report.ok and said in str(report)


weight = torch.rand(2, requires_grad=True)


class Dropped(torch.autograd.Function):
    """z^3 whose second derivative is dropped."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**3

    @staticmethod
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return grad_output * (3 * z.detach() ** 2).conj()


def test_second_derivatives_of_complex_inputs_are_compared():
    z = torch.randn(3, dtype=torch.complex64)
    wrong = compare(
        Call(Dropped.apply, (z.requires_grad_(),), reference=lambda z: z**3),
        Device("cpu"),
        ["value", "order 1", "order 2"],
        torch.float64,
    )
    assert list(wrong.wrong) == ["order 2"]


def test_a_difference_from_zero_is_infinite():
    assert worst_error({"y": torch.ones(2)}, {"y": torch.zeros(2)}, 0.0)[0] == float("inf")


def test_an_audited_function_may_work_in_place():
    assert audit(lambda x: x.mul_(2).exp(), torch.rand(3), device="cpu").ok


def test_a_file_with_a_dataclass(tmp_path):
    file = tmp_path / "torch.py"  # which must not hide torch
    lines = ["from __future__ import annotations", "import dataclasses, torch"]
    lines += [
        "@dataclasses.dataclass",
        "class A:",
        "    n: int",
        "def job(): return abs, torch.rand(2)",
    ]
    file.write_text("\n".join(lines))
    _, (x,) = _target.resolve(f"{file}:job", ())
    assert isinstance(x, torch.Tensor)


def test_audit_differentiates_the_inputs_where_nothing_requires_a_gradient():
    report = audit(loss, torch.rand(3), device="cpu")
    assert str(report) == "value: right\norder 1: right\norder 2: right"
    integers = audit(loss, torch.arange(3), device="cpu")
    assert "order 1: nothing to compare" in str(integers)


def test_tpu_compiles_a_module():
    pytest.importorskip("jax")
    pytest.importorskip("libtpu")
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert tpu.compile(net, torch.rand(2, 3, 8, 8)).convolutions == 1
    report = tpu.compile(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8))
    assert report.convolutions == 1 and report.name == "Conv2d"
    step = tpu.compile(inner_step, Tied(), torch.rand(2, 3))
    assert step.cycles > 0 and step.name == "inner_step"

    def nested(x, w, scale):
        y = torch.conv2d(x, w).square().sum() * scale
        return y, {"gradients": torch.autograd.grad(y, [x, w])}

    inputs = [torch.rand(s, requires_grad=True) for s in ((2, 3, 8, 8), (4, 3, 3, 3))]
    assert tpu.compile(nested, *inputs, 2.0).convolutions == 3
    with pytest.raises(ValueError, match="fn must return tensors, got float without any"):
        tpu.compile(lambda x: 1.0, torch.rand(2))
