"""Second-order MAML on torch_xla: stock drops the second derivative of max_pool2d."""

import maml
import torch
from device import on_xla
from support import worst_error

import torch_convfix


def test_meta_gradient():
    generator = torch.Generator().manual_seed(0)
    parameters = maml.initial_parameters(generator, torch.float64)
    task = maml.draw_task(maml.load_images(), generator, torch.float64)
    want = maml.meta_gradient(parameters, task)

    def step(*flat):
        parameters = [p.detach().requires_grad_() for p in flat[:-4]]
        return maml.meta_gradient(parameters, flat[-4:])

    with torch_convfix.disabled("xla"):
        stock = on_xla(step, *parameters, *task)
    ours = on_xla(step, *parameters, *task)
    assert worst_error(stock[:1], want[:1]) < 1e-10  # the loss is right
    assert worst_error(stock, want) > 0.1
    assert worst_error(ours, want) < 1e-9
