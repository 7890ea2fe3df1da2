"""Stock against torch_convfix against float64 on the CPU: every number is computed in this run."""

import argparse
import contextlib
import importlib
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

os.environ.setdefault("PJRT_DEVICE", "CPU")

import maml
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from torch_convfix.commands._options import NATURAL, Formatter, add

Run = Callable[[Callable[..., Sequence[Tensor]], Sequence[Tensor]], list[Tensor]]

DEVICES = {"torch_xla": "xla", "torch_tpu": "tpu"}
TASKS = 3


class Stack:
    """One TPU stack: how it runs a step, and how its kernels are changed for ours."""

    def __init__(self, name: str) -> None:
        self.device = DEVICES[name]
        self.trace = importlib.import_module(f"torch_convfix.tpu.{name}").trace
        # Every number on TorchTPU comes from its trace, run on XLA:CPU, which has no float64 there.
        self.dtype = torch.float64 if name == "torch_xla" else torch.float32
        self.run: Run = self._run_trace
        if name == "torch_xla":
            import torch_xla

            self.run = self._run_on_xla
            # Before any backward on the CPU: the autograd engine counts devices once.
            self.xla = torch_xla.device()
            self.sync = torch_xla.sync

    def _run_on_xla(self, step, inputs) -> list[Tensor]:
        copies = [t.detach().to(self.xla).requires_grad_(t.requires_grad) for t in inputs]
        results = step(*copies)
        self.sync()  # once, with all results alive
        return [t.detach().cpu() for t in results]

    def _run_trace(self, step, inputs) -> list[Tensor]:
        from torch_convfix.tpu._jax import execute

        return execute(self.trace(step, inputs), inputs)

    def kernels(self, hardware: str | None = None) -> Iterator[tuple[str, contextlib.ExitStack]]:
        """Stock's, then ours."""
        import torch_convfix

        options = {"hardware": hardware} if self.device == "xla" and hardware else {}
        yield "stock", torch_convfix.disabled(self.device)
        yield "ours", torch_convfix.enabled(self.device, **options)


def worst_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest deviation, as a share of the largest entry of its tensor."""
    pairs = zip(got, want, strict=True)
    return max(((g.double() - w).abs().max() / w.abs().max()).item() for g, w in pairs)


def gradient_penalty(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    critic = torch.tanh(F.conv2d(x, w, b, stride=2, padding=1)).mean((1, 2, 3))
    (gradient,) = torch.autograd.grad(critic.sum(), x, create_graph=True)
    loss = ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()
    return [loss, *torch.autograd.grad(loss, [x, w, b])]


def depthwise_penalty(x: Tensor, w: Tensor) -> Sequence[Tensor]:
    y = F.conv2d(x, w, stride=2, padding=1, groups=w.shape[0])
    gradients = torch.autograd.grad(torch.tanh(y).mean(), [w, x], create_graph=True)
    return torch.autograd.grad(sum((g * g).sum() for g in gradients), [w, x])


def grouped_weight_grad(x: Tensor, g: Tensor) -> list[Tensor]:
    w = torch.zeros(128, 4, 3, 3, device=x.device, requires_grad=True)
    return list(torch.autograd.grad(F.conv2d(x, w, padding=1, groups=32), w, g))


def percent(error: float) -> str:
    return f"{100 * error:.1f} % wrong" if error > 1e-3 else f"right to {error:.0e}"


def compare(stack: Stack, step, inputs: Sequence[Tensor]) -> list[str]:
    """The error against float64 on the CPU with each kind of kernels."""
    exact = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in inputs
    ]
    want = step(*exact)
    own = [
        t.detach().to(stack.dtype).requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in inputs
    ]
    cells = []
    for _, context in stack.kernels():
        with context:
            cells.append(percent(worst_error(stack.run(step, own), want)))
    return cells


def show_penalty(stack: Stack, table: Table, progress: Progress) -> None:
    task = progress.add_task("gradient penalty through a stride-2 convolution", total=2)
    for kernel in (3, 4):
        generator = torch.Generator().manual_seed(kernel)
        x = torch.rand(32, 3, 32, 32, generator=generator)
        w = torch.randn(20, 3, kernel, kernel, generator=generator) / 5
        inputs = [t.requires_grad_() for t in (x, w, torch.zeros(20))]
        table.add_row(
            f"gradient penalty, Conv2d(3, 20, {kernel}, stride 2, padding 1)",
            *compare(stack, gradient_penalty, inputs),
        )
        progress.advance(task)


def show_meta_gradient(stack: Stack, table: Table, progress: Progress) -> None:
    bar = progress.add_task("second-order MAML on digits", total=TASKS)
    images = maml.load_images()
    for i in range(TASKS):
        generator = torch.Generator().manual_seed(i)
        parameters = maml.initial_parameters(generator, torch.float64)
        task = maml.draw_task(images, generator, torch.float64)

        def step(*flat):
            return maml.meta_gradient(flat[:-4], flat[-4:])

        table.add_row(
            f"MAML meta-gradient, 5-way task {i + 1}", *compare(stack, step, [*parameters, *task])
        )
        progress.advance(bar)


def show_convolutions(stack: Stack, table: Table, progress: Progress) -> None:
    bar = progress.add_task("depthwise penalty step", total=2)
    inputs = [
        torch.zeros(32, 96, 56, 56, requires_grad=True),
        torch.zeros(96, 1, 3, 3, requires_grad=True),
    ]
    cells = []
    for _, context in stack.kernels("tpu"):
        with context:
            text = stack.trace(depthwise_penalty, inputs)
        cells.append(f"{text.count('stablehlo.convolution')} convolutions")
        progress.advance(bar)
    table.add_row("penalty step of a depthwise layer of 96 channels, for a TPU", *cells)


def show_speed(stack: Stack, table: Table, progress: Progress) -> None:
    rounds = 4
    bar = progress.add_task("grouped weight gradient", total=2 * rounds)
    inputs = [torch.rand(4, 128, 28, 28), torch.rand(4, 128, 28, 28)]
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for i in range(rounds):
        for name, context in stack.kernels():
            with context:
                start = time.perf_counter()
                stack.run(grouped_weight_grad, inputs)
            if i:  # the first round compiles
                seconds[name].append(time.perf_counter() - start)
            progress.advance(bar)
    medians = [statistics.median(taken) for taken in seconds.values()]
    table.add_row(
        "weight gradient of 128 channels in 32 groups, here",
        f"{medians[0]:.3f} s",
        f"{medians[1]:.3f} s ({medians[0] / medians[1]:.0f} x faster)",
    )


def meta_train(out: pathlib.Path, steps: int, console: Console) -> None:
    """Meta-train on the device; save the accuracy after adaptation as a plot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import torch_xla

    device = torch_xla.device()
    generator = torch.Generator().manual_seed(0)
    images = maml.load_images()
    parameters = [
        p.detach().to(device).requires_grad_()
        for p in maml.initial_parameters(generator, torch.float32)
    ]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    tasks_a_step = 2
    losses, accuracies = [], []
    with Progress(console=console) as progress:
        for _ in progress.track(range(steps), description="meta-training on the device"):
            loss, right = 0, 0
            for _ in range(tasks_a_step):
                task = maml.draw_task(images, generator, torch.float32)
                support_x, support_y, query_x, query_y = (t.to(device) for t in task)
                adapted = maml.adapt(parameters, support_x, support_y, create_graph=True)
                answers = maml.logits(adapted, query_x)
                loss = loss + F.cross_entropy(answers, query_y) / tasks_a_step
                right = right + (answers.argmax(1) == query_y).float().mean() / tasks_a_step
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.item())
            accuracies.append(right.item())

    tenth = max(1, steps // 10)
    first = statistics.mean(accuracies[:tenth])
    last = statistics.mean(accuracies[-tenth:])
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    left.plot(accuracies, color="tab:blue", alpha=0.3)
    smooth = [statistics.mean(accuracies[max(0, i - 9) : i + 1]) for i in range(steps)]
    left.plot(smooth, color="tab:blue", label="accuracy after adaptation, mean of 10 steps")
    left.axhline(1 / maml.WAYS, color="gray", linestyle=":", label="chance")
    left.set(xlabel="meta-step", ylabel="accuracy on query images", ylim=(0, 1))
    left.set_title("Second-order MAML on digits, 5-way 5-shot, on XLA with torch_convfix")
    left.legend(loc="lower right")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "maml.png", dpi=120)
    console.print(
        f"Meta-training: accuracy after one inner step {first:.0%} in the first {tenth} meta-steps, "
        f"{last:.0%} in the last {tenth}; plot in {out / 'maml.png'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    add(parser, "--stack", default="torch_xla")
    add(parser, "--out", "plots", metavar="FOLDER", default=pathlib.Path("out"))
    parser.add_argument("--steps", type=NATURAL, default=100, metavar="N", help="of meta-training")
    args = parser.parse_args()

    console = Console()
    stack = Stack(args.stack)
    import torch_convfix

    print(torch_convfix.status())
    table = Table(title=f"{args.stack}: errors are against float64 on the CPU")
    table.add_column("step")
    table.add_column("stock", style="red")
    table.add_column("torch_convfix", style="green")
    parts = [show_penalty, show_meta_gradient, show_convolutions]
    if args.stack == "torch_xla":
        parts.append(show_speed)
    with Progress(console=console) as progress:
        for show in parts:
            show(stack, table, progress)
    console.print(table)
    if args.stack == "torch_xla":
        meta_train(args.out, args.steps, console)


if __name__ == "__main__":
    main()
