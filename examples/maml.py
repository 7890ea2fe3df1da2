"""MAML on scikit-learn's digits, first-order and second-order: 5-way 5-shot on digits that training never saw.

    python examples/maml.py [--device cpu|xla] [--stock] [--quick]

Second-order with torch.func (vmap over tasks) and with torch.autograd.grad (a loop over tasks), Finn et al.,
2017, arXiv:1703.03400. Five digits train, in eight orientations that count as classes of their own (as
is usual for Omniglot); the other five, upright, test. Checks the meta-gradient against float64 on the CPU,
that the vmap step has as many convolutions for 8 tasks as for 2, and the accuracy after adaptation.
"""

import time
from collections.abc import Callable, Sequence

import harness
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

import torch_convfix

WAYS, SHOTS, QUERIES, CHANNELS = 5, 5, 10, 16
INNER_RATE = 0.4
TRAIN_DIGITS, TEST_DIGITS = range(5), range(5, 10)
WIDTH = 32  # of the net that is trained
TASKS, STEPS, RATE = 4, 400, 3e-3  # a meta-step; meta-steps; Adam's
TEST_TASKS, CHUNK, MOST_INNER_STEPS = 400, 100, 5

Task = tuple[Tensor, Tensor, Tensor, Tensor]  # support images and labels, query images and labels
Loss = Callable[[list[Tensor], Task], Tensor]
# From parameters and a batch of tasks to the mean query loss and its gradients.
MetaStep = Callable[[list[Tensor], Task], list[Tensor]]


def load_images() -> dict[int, Tensor]:
    """Digit -> its images, ``[number, 1, 8, 8]``, between 0 and 1."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).unsqueeze(1) / 16
    return {d: images[torch.from_numpy(digits.target == d)] for d in range(10)}


def oriented(images: dict[int, Tensor]) -> dict[int, Tensor]:
    """Every class in eight orientations, each a class: a quarter turn more or less, mirrored or not."""
    classes = []
    for own in images.values():
        for turns in range(4):
            turned = own.rot90(turns, (2, 3))
            classes += [turned, turned.flip(3)]
    return dict(enumerate(classes))


def draw_task(images: dict[int, Tensor], generator: torch.Generator, dtype: torch.dtype) -> Task:
    """Five classes with labels in random order, so that there is something to adapt to."""
    support, query = [], []
    classes = list(images.values())
    for i in torch.randperm(len(classes), generator=generator)[:WAYS].tolist():
        own = classes[i]
        chosen = own[torch.randperm(len(own), generator=generator)[: SHOTS + QUERIES]].to(dtype)
        support.append(chosen[:SHOTS])
        query.append(chosen[SHOTS:])
    labels = torch.arange(WAYS)
    return (
        torch.cat(support),
        labels.repeat_interleave(SHOTS),
        torch.cat(query),
        labels.repeat_interleave(QUERIES),
    )


def draw_tasks(
    images: dict[int, Tensor], number: int, generator: torch.Generator, device: torch.device
) -> Task:
    """``number`` tasks along a first dimension."""
    drawn = [draw_task(images, generator, torch.float32) for _ in range(number)]
    support_x, support_y, query_x, query_y = (
        torch.stack(part).to(device) for part in zip(*drawn, strict=True)
    )
    return support_x, support_y, query_x, query_y


def initial_parameters(
    generator: torch.Generator, dtype: torch.dtype, channels: int = CHANNELS
) -> list[Tensor]:
    """Weight, BN scale and BN shift of each block, then the linear layer's weight and bias."""
    parameters, channels_in = [], 1
    for _ in range(3):
        w = torch.randn(channels, channels_in, 3, 3, generator=generator, dtype=torch.float64)
        parameters += [
            w * (2 / (9 * channels_in)) ** 0.5,
            torch.ones(channels),
            torch.zeros(channels),
        ]
        channels_in = channels
    w = torch.randn(WAYS, channels, generator=generator, dtype=torch.float64)
    parameters += [w / channels**0.5, torch.zeros(WAYS)]
    return [p.to(dtype).requires_grad_() for p in parameters]


def logits(parameters: Sequence[Tensor], x: Tensor) -> Tensor:
    for i in range(0, 9, 3):
        w, scale, shift = parameters[i : i + 3]
        x = F.conv2d(x, w, padding=1)
        # Not batch_norm's own weight: PyTorch's own derivatives, which --stock takes, are wrong in vmap.
        x = F.batch_norm(x, None, None, training=True)
        x = x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)
        x = F.max_pool2d(F.relu(x), 2)
    return F.linear(x.flatten(1), *parameters[9:])


def adapt(parameters: Sequence[Tensor], x: Tensor, y: Tensor, create_graph: bool) -> list[Tensor]:
    """One gradient step on the support set."""
    loss = F.cross_entropy(logits(parameters, x), y)
    gradients = torch.autograd.grad(loss, parameters, create_graph=create_graph)
    return [p - INNER_RATE * g for p, g in zip(parameters, gradients, strict=True)]


def meta_loss(parameters: Sequence[Tensor], task: Task) -> Tensor:
    support_x, support_y, query_x, query_y = task
    adapted = adapt(parameters, support_x, support_y, create_graph=True)
    return F.cross_entropy(logits(adapted, query_x), query_y)


def meta_gradient(parameters: Sequence[Tensor], task: Task) -> list[Tensor]:
    """The meta-loss and its gradient with respect to the parameters before the inner step."""
    loss = meta_loss(parameters, task)
    return [loss, *torch.autograd.grad(loss, parameters)]


def second_order_loop(parameters: list[Tensor], tasks: Task) -> list[Tensor]:
    """With torch.autograd.grad, task by task."""
    loss = torch.stack([meta_loss(parameters, task) for task in zip(*tasks, strict=True)]).mean()
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def func_loss(parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits(parameters, x), y)


def func_adapt(parameters: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """`adapt` for torch.func."""
    gradients = grad(func_loss)(parameters, x, y)
    return [p - INNER_RATE * g for p, g in zip(parameters, gradients, strict=True)]


def second_order_vmap(parameters: list[Tensor], tasks: Task) -> list[Tensor]:
    """With torch.func: the tasks are one more dimension of every operator."""

    def of_task(parameters, support_x, support_y, query_x, query_y):
        return func_loss(func_adapt(parameters, support_x, support_y), query_x, query_y)

    def mean(parameters):
        return vmap(of_task, (None, 0, 0, 0, 0))(parameters, *tasks).mean()

    gradients, loss = torch.func.grad_and_value(mean)([p.detach() for p in parameters])
    return [loss, *gradients]


def first_order(parameters: list[Tensor], tasks: Task) -> list[Tensor]:
    """As if the adapted parameters were constants plus the parameters."""

    def of_task(parameters, support_x, support_y, query_x, query_y):
        adapted = func_adapt(parameters, support_x, support_y)
        return torch.func.grad_and_value(func_loss)(adapted, query_x, query_y)

    own = [p.detach() for p in parameters]
    gradients, losses = vmap(of_task, (None, 0, 0, 0, 0))(own, *tasks)
    return [losses.mean(), *(g.mean(0) for g in gradients)]


def accuracies(parameters: list[Tensor], tasks: Task) -> Tensor:
    """``[tasks, inner steps + 1]``: on each task's query images, before adaptation and after each step."""

    def of_task(parameters, support_x, support_y, query_x, query_y):
        found = []
        for step in range(MOST_INNER_STEPS + 1):
            if step:
                parameters = func_adapt(parameters, support_x, support_y)
            right = logits(parameters, query_x).argmax(1) == query_y
            found.append(right.float().mean())
        return torch.stack(found)

    return vmap(of_task, (None, 0, 0, 0, 0))([p.detach() for p in parameters], *tasks)


def test(parameters: list[Tensor], images: dict[int, Tensor], number: int) -> Tensor:
    """`accuracies` on ``number`` tasks, the same for every call."""
    generator = torch.Generator().manual_seed(1)
    device = parameters[0].device
    found = []
    for start in range(0, number, CHUNK):
        tasks = draw_tasks(images, min(CHUNK, number - start), generator, device)
        found.append(accuracies(parameters, tasks))
        harness.sync(device)
    return torch.cat([part.cpu() for part in found])


def nearest_mean(images: dict[int, Tensor], number: int) -> float:
    """Accuracy of the nearest class mean of the support images' pixels, on the tasks of `test`."""
    generator = torch.Generator().manual_seed(1)
    right = 0.0
    for _ in range(number):
        support_x, _, query_x, query_y = draw_task(images, generator, torch.float32)
        means = support_x.flatten(1).unflatten(0, (WAYS, SHOTS)).mean(1)
        answers = torch.cdist(query_x.flatten(1), means).argmin(1)
        right += (answers == query_y).float().mean().item()
    return right / number


def interval(of_tasks: Tensor) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    return of_tasks.mean().item(), 1.96 * of_tasks.std().item() / len(of_tasks) ** 0.5


def train(
    name: str, method: MetaStep, images: dict[int, Tensor], steps: int, device: torch.device
) -> tuple[list[Tensor], list[float], int]:
    """The parameters, the query loss step by step, and the graphs compiled after the second step.

    Every method begins with the same parameters and meets the same tasks.
    """
    generator = torch.Generator().manual_seed(0)
    first = initial_parameters(generator, torch.float32, WIDTH)
    parameters = [p.detach().to(device).requires_grad_() for p in first]
    optimizer = torch.optim.Adam(parameters, lr=RATE)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, compiled = [], 0
    for i in track(range(steps), name, console=harness.console):
        loss, *gradients = method(parameters, draw_tasks(images, TASKS, generator, device))
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        # Two graphs: the optimizer's differs in its first step, and compiles in no time.
        harness.sync(device)
        optimizer.step()
        harness.sync(device)
        decay.step()
        losses.append(loss.cpu().item())
        if i == 1:
            compiled = graphs()
    return parameters, losses, graphs() - compiled


def graphs() -> int:
    """How many torch_xla has compiled."""
    compilation = torch_convfix.status().compilation
    return 0 if compilation is None else compilation.graphs


def flat(method: MetaStep) -> Callable[..., list[Tensor]]:
    """Of parameters and a batch of tasks, one after the other."""
    return lambda *given: method(list(given[:-4]), given[-4:])


def first_inputs(tasks: int) -> list[Tensor]:
    """Parameters before training and a batch of tasks, on the CPU, for a `flat` method."""
    parameters = initial_parameters(torch.Generator().manual_seed(0), torch.float32, WIDTH)
    generator = torch.Generator().manual_seed(2)
    return [*parameters, *draw_tasks(load_images(), tasks, generator, torch.device("cpu"))]


def convolutions(method: MetaStep, tasks: int) -> int:
    """In the StableHLO of one meta-step."""
    from torch_convfix.tpu.torch_xla import trace

    return trace(flat(method), first_inputs(tasks)).count("stablehlo.convolution")


def meta_error(method: MetaStep, device: torch.device) -> float:
    """Of the loss and the meta-gradient, against the loop over tasks in float64 on the CPU."""
    return harness.gradient_error(flat(method), first_inputs(2), device, flat(second_order_loop))


def draw(results: dict[str, tuple[list[float], Tensor]], baseline: float, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, (losses, found)) in enumerate(results.items()):
        width = max(1, len(losses) // 20)
        smooth = torch.tensor(losses).unfold(0, width, 1).mean(1)
        left.plot(range(width - 1, len(losses)), smooth, label=name)
        means, halves = zip(*(interval(column) for column in found.T), strict=True)
        places = [step + 0.06 * (i - 1) for step in range(len(means))]
        right.errorbar(places, means, halves, marker="o", markersize=4, capsize=3, label=name)
    left.set(xlabel="meta-step", title=f"Query loss in training, mean of {width} steps")
    left.legend()
    right.axhline(1 / WAYS, color="gray", linestyle=":", label="chance")
    right.axhline(baseline, color="gray", linestyle="--", label="nearest mean of the pixels")
    right.set(xlabel="inner steps", title="Accuracy on held-out digits", ylim=(0, 1))
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)


METHODS: dict[str, MetaStep] = {
    "first-order": first_order,
    "second-order, torch.func": second_order_vmap,
    "second-order, torch.autograd": second_order_loop,
}


def check_gradients(device: torch.device, checks: dict[str, bool]) -> dict[str, MetaStep]:
    """Add the checks of one meta-step; returns the methods that the device can run."""
    methods = dict(METHODS)
    for name, method in METHODS.items():
        if method is first_order:
            continue
        try:
            error = meta_error(method, device)
        except RuntimeError as refusal:  # stock, where a functorch transform meets its max pool
            harness.console.print(f"{name} raises: {str(refusal).splitlines()[0]}", markup=False)
            checks[f"{name} runs"] = False
            del methods[name]
            continue
        checks[f"the meta-gradient of {name} is {harness.right(error)}"] = error < 1e-6
    if device.type == "xla" and second_order_vmap in methods.values():
        few, many = (convolutions(second_order_vmap, n) for n in (2, 8))
        checks[f"the vmap step has {few} convolutions for 2 tasks, {many} for 8"] = few == many
    return methods


def main() -> int:
    args = harness.options(__doc__, "maml").parse_args()
    device = harness.start(args)
    checks: dict[str, bool] = {}
    methods = check_gradients(device, checks)
    if (
        second_order_vmap not in methods.values()
    ):  # adaptation in training and test is by torch.func
        return harness.verdict(checks)
    images = load_images()
    training = oriented({d: images[d] for d in TRAIN_DIGITS})
    held_out = {d: images[d] for d in TEST_DIGITS}
    number = 10 if args.quick else TEST_TASKS
    results = {}
    for name, method in methods.items():
        begin = time.perf_counter()
        parameters, losses, compiled = train(
            name, method, training, 3 if args.quick else STEPS, device
        )
        seconds = time.perf_counter() - begin
        found = test(parameters, held_out, number)
        results[name] = losses, found
        before, once, after = (interval(found[:, i]) for i in (0, 1, MOST_INNER_STEPS))
        harness.console.print(
            f"{name}: {seconds:.0f} s on {device}; accuracy on held-out digits {percent(before)} before "
            f"adaptation, {percent(once)} after 1 step, {percent(after)} after {MOST_INNER_STEPS}"
        )
        checks[f"{name}: {compiled} graphs compiled after the second step"] = compiled == 0
    baseline = nearest_mean(held_out, number)
    harness.console.print(f"nearest mean of the support images' pixels: {baseline:.1%}")
    draw(results, baseline, args.out / "maml.png")
    if not args.quick:
        finals = {name: interval(found[:, -1]) for name, (_, found) in results.items()}
        for name, (mean, _) in finals.items():
            if name == "first-order":
                continue
            checks[f"{name}: at least 85 % after adaptation ({mean:.1%})"] = mean >= 0.85
            if "first-order" in finals:
                least = finals["first-order"][0] - finals["first-order"][1]
                claim = f"{name}: not below first-order's interval, which begins at {least:.1%}"
                checks[claim] = mean >= least
    return harness.verdict(checks)


def percent(of: tuple[float, float]) -> str:
    return f"{of[0]:.1%} ± {of[1]:.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
