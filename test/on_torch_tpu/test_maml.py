"""Second-order MAML on TorchTPU: stock drops the second derivative of cross_entropy."""

import maml
import torch
from placeholders import on_tpu
from support import worst_error

import torch_convfix


def test_meta_gradient():
    generator = torch.Generator().manual_seed(0)
    parameters = maml.initial_parameters(generator, torch.float64)
    task = maml.draw_task(maml.load_images(), generator, torch.float64)
    want = maml.meta_gradient(parameters, task)
    single = [p.detach().float().requires_grad_() for p in parameters]
    single += [t.float() if t.is_floating_point() else t for t in task]

    def step(*flat):
        return maml.meta_gradient(flat[:-4], flat[-4:])

    with torch_convfix.disabled("tpu"):
        stock = on_tpu(step, *single)
    with torch_convfix.enabled("tpu"):
        ours = on_tpu(step, *single)
    assert worst_error(stock[:1], want[:1]) < 1e-5  # the loss is right
    assert worst_error(stock, want) > 0.1
    assert worst_error(ours, want) < 1e-4
