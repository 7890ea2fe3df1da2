"""WGAN-GP on scikit-learn's digits: transposed convolutions with output padding, an in-place critic.

    python examples/wgan_gp.py [--device cpu|xla] [--stock] [--quick]

The generator doubles 2x2 twice with kernel 3, stride 2 and output_padding 1; the critic's LeakyReLUs write
in place; the penalty pulls the norm of its input gradient to 1 (Gulrajani et al., 2017, arXiv:1704.00028).
Checks the critic's gradient against float64 on the CPU, and that the norm comes near 1.
"""

import statistics
import time

import harness
import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

LATENT, BATCH, CRITIC_STEPS, PENALTY = 16, 64, 3, 10.0


def make_generator() -> nn.Module:
    up = dict(kernel_size=3, stride=2, padding=1, output_padding=1)
    return nn.Sequential(
        nn.Linear(LATENT, 64 * 4),
        nn.Unflatten(1, (64, 2, 2)),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(64, 32, **up),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 16, **up),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 1, 3, padding=1),
        nn.Sigmoid(),
    )


def make_critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(256, 1),
    )


def critic_loss(critic, real: Tensor, fake: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the mean norm of the gradient between ``real`` and ``fake`` at ``mix``."""
    between = (mix * real + (1 - mix) * fake).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    norm = gradient.flatten(1).norm(dim=1)
    loss = critic(fake).mean() - critic(real).mean() + PENALTY * (norm - 1).square().mean()
    return loss, norm.mean()


def critic_step(critic: nn.Module, real: Tensor):
    """The gradient of the critic's loss as a function of tensors, and these."""
    names, values = zip(*critic.state_dict().items(), strict=True)

    def step(real, fake, mix, *parameters):
        def own(x):
            return functional_call(critic, dict(zip(names, parameters, strict=True)), x)

        loss, norm = critic_loss(own, real, fake, mix)
        # The last bias adds the same to every image, which the loss does not see.
        return [loss, norm, *torch.autograd.grad(loss, parameters[:-1])]

    return step, [real, torch.rand_like(real), torch.rand(len(real), 1, 1, 1), *values]


def train(generator, critic, images: Tensor, steps: int, device: torch.device):
    """The gradient norm and the critic's estimate of the distance, step by step."""
    settings = dict(lr=1e-3, betas=(0.5, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), **settings)
    of_critic = torch.optim.Adam(critic.parameters(), **settings)
    norms, distances = [], []
    for _ in track(range(steps), "training", console=harness.console):
        for _ in range(CRITIC_STEPS):
            real = images[torch.randint(len(images), (BATCH,))].to(device)
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, LATENT).to(device))
            loss, norm = critic_loss(critic, real, fake, torch.rand(BATCH, 1, 1, 1).to(device))
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            harness.sync(device)
        of_generator.zero_grad()
        distance = (
            critic(real).mean() - critic(generator(torch.randn(BATCH, LATENT).to(device))).mean()
        )
        distance.backward()
        of_generator.step()
        harness.sync(device)
        norms.append(norm.detach().cpu().item())
        distances.append(distance.detach().cpu().item())
    return norms, distances


def draw(samples: Tensor, norms: list[float], distances: list[float], path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    grid, curve = figure.subplots(1, 2)
    rows = nn.functional.pad(samples[:, 0], [1, 1, 1, 1]).unflatten(0, (4, -1))
    grid.imshow(rows.transpose(1, 2).flatten(2).flatten(0, 1).numpy(), cmap="gray")
    grid.set_axis_off()
    grid.set_title("Samples")
    curve.plot(norms, label="mean norm of the critic's input gradient")
    curve.plot(distances, alpha=0.6, label="critic(real) - critic(fake)")
    curve.axhline(1, color="gray", linestyle=":")
    curve.set(xlabel="generator step", title="Training")
    curve.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    args = harness.options(__doc__, "wgan_gp").parse_args()
    device = harness.start(args)
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    generator, critic = make_generator(), make_critic()
    error = harness.gradient_error(*critic_step(critic, images[:8]), device)
    checks = {f"the critic's second-order gradient is {harness.right(error)}": error < 1e-6}
    generator, critic = generator.to(device), critic.to(device)
    begin = time.perf_counter()
    norms, distances = train(generator, critic, images, 5 if args.quick else 400, device)
    harness.console.print(f"{len(norms)} steps on {device} in {time.perf_counter() - begin:.0f} s")
    with torch.no_grad():
        samples = generator(torch.randn(32, LATENT).to(device)).cpu()
    draw(samples, norms, distances, args.out / "wgan_gp.png")
    if not args.quick:
        norm = statistics.mean(norms[-len(norms) // 5 :])
        checks[f"the norm at the end is {norm:.2f}, within 0.2 of 1"] = abs(norm - 1) < 0.2
        # As varied and as bright as the data: one sample for all noise has no variance.
        of_data, of_samples = images.var(0).mean().item(), samples.var(0).mean().item()
        claim = f"the pixels vary as the data's do ({of_samples:.3f}, {of_data:.3f})"
        checks[claim] = 0.5 < of_samples / of_data < 2
    return harness.verdict(checks)


if __name__ == "__main__":
    raise SystemExit(main())
