"""What commands are pointed at: functions by name, inputs by spec, modules as functions of tensors."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from torch_convfix import _target, cli, tpu
from torch_convfix.verify.audit import audit

HERE = __file__


def loss(x):
    return x.square().sum()


def with_inputs():
    return loss, torch.rand(2)


def with_a_list():
    return loss, [torch.rand(2)]


def lone():
    return torch.rand(2)


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
        (f"{HERE}:nothing", (), "target must name a function of .*, got '.*:nothing'"),
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
        ["tpu", f"{HERE}:loss", "--input", "2", "--topology", "v9"],
        ["tpu", "loss"],
        ["tpu", f"{HERE}:loss", "--input", "2,3"],
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, capfd):
    assert cli.main(arguments) == 2
    assert "Traceback" not in capfd.readouterr().err


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
    function, (own, (state, given)) = _target.as_function(inner_step, [net, x])
    assert own == {} and given is x and set(state) == dict(net.named_parameters()).keys()
    twice = {k: t.detach() * 2 for k, t in state.items()}
    got = function((own, [{k: t.requires_grad_() for k, t in twice.items()}, x]))
    other = Tied().double()
    other.load_state_dict(twice, strict=False)
    torch.testing.assert_close(got, inner_step(other, x))
    gradients = torch.autograd.grad(got, list(twice.values()))
    want = torch.autograd.grad(inner_step(other, x), list(other.parameters()))
    torch.testing.assert_close(list(gradients), list(want))


def test_audit_differentiates_the_inputs_where_nothing_requires_a_gradient():
    report = audit(loss, torch.rand(3), device="cpu")
    assert str(report) == "value: right\norder 1: right\norder 2: right"
    integers = audit(loss, torch.arange(3), device="cpu")
    assert "order 1: nothing to compare" in str(integers)


def test_tpu_compiles_a_module():
    pytest.importorskip("jax")
    pytest.importorskip("libtpu")
    report = tpu.compile(nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8))
    assert report.convolutions == 1 and report.name == "Conv2d"
    step = tpu.compile(inner_step, Tied(), torch.rand(2, 3))
    assert step.cycles > 0 and step.name == "inner_step"
