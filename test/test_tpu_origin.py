"""The pass and the line that an operator comes from."""

import torch

from torch_convfix.tpu._origin import labelled


def test_passes_and_lines_of_a_penalty_step():
    seen = []

    def label(name, call):
        seen.append(name)
        return call()

    x = torch.rand(3, requires_grad=True)
    with labelled(label) as origins:
        first = test_passes_and_lines_of_a_penalty_step.__code__.co_firstlineno + 9
        y = torch.sin(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad((g * g).sum(), x)
    found = {(o.stage, int(o.source.rsplit(":")[-1]) - first) for o in map(origins.get, seen)}
    assert all(o.source.startswith(__file__) for o in origins.values())
    # The sine's line in three passes; the sums' lines forward and backward.
    assert {("forward", 1), ("backward", 1), ("double backward", 1)} <= found
    assert {stage for stage, line in found if line == 3} == {"forward", "double backward"}
