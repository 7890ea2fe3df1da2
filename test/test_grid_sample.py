"""Derivatives of grid_sample on the CPU, of every order and in forward mode."""

import pytest
import torch
from grid_sample_cases import KINDS, formula, sample, tensors
from support import derivatives, worst_error
from torch import Tensor
from torch.nn import functional as F

import torch_convfix

every_kind = pytest.mark.parametrize(("dim", "mode", "padding", "align"), KINDS)
every_2d_kind = pytest.mark.parametrize(
    ("dim", "mode", "padding", "align"), [k for k in KINDS if k[0] == 2]
)


@pytest.fixture(autouse=True)
def on_cpu():
    with torch_convfix.enabled("cpu"):
        yield


def kinks(dim: int) -> Tensor:
    """A grid whose points lie on pixels, borders and folds."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor(
        [-1, 1, -1.25, 1.25, 0, 0.5, -0.5, 1.5, -1.5, 0.75, 3, -3.1, 2 / 3], dtype=torch.float64
    )
    return values[torch.randint(13, (2, *(4, 5, 4)[:dim], dim), generator=generator)]


def first(fn, inputs, cotangent, **kwargs):
    return torch.autograd.grad(fn(*inputs), inputs, cotangent, **kwargs)


@every_kind
def test_three_orders(dim, mode, padding, align):
    inputs = tensors(dim)
    got = derivatives(sample(mode, padding, align), inputs, 3)
    if mode == "nearest":  # constant in the grid, where autograd of the formula has no graph
        image, grid = inputs
        got = derivatives(lambda x: sample(mode, padding, align)(x, grid), [image], 3)
        want = derivatives(lambda x: formula(mode, padding, align)(x, grid), [image], 3)
    else:
        want = derivatives(formula(mode, padding, align), inputs, 3)
    assert worst_error(got, want) < 1e-10


@every_kind
def test_gradgradcheck(dim, mode, padding, align):
    inputs = [t.requires_grad_() for t in tensors(dim)]
    assert torch.autograd.gradgradcheck(sample(mode, padding, align), inputs, fast_mode=True)


def test_third_order_by_differences():
    def gradient(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        y = sample("bilinear", "border", False)(x, g)
        return torch.autograd.grad(y.pow(3).sum(), [x, g], create_graph=True)

    inputs = [t.requires_grad_() for t in tensors(2)]
    assert torch.autograd.gradgradcheck(gradient, inputs)


@every_kind
@pytest.mark.parametrize("on_kinks", [False, True])
def test_first_derivative_is_the_stock_kernels(dim, mode, padding, align, on_kinks):
    """Bitwise where no graph of it is built, else to rounding, with the same side at each kink."""
    image, grid = tensors(dim)
    inputs = [image.requires_grad_(), (kinks(dim) if on_kinks else grid).requires_grad_()]
    fn = sample(mode, padding, align)
    cotangent = torch.randn_like(fn(*inputs))
    with torch_convfix.disabled("cpu"):
        want = first(fn, inputs, cotangent)
    for got, stock in zip(first(fn, inputs, cotangent), want, strict=True):
        assert torch.equal(got, stock)
    for got, stock in zip(first(fn, inputs, cotangent, create_graph=True), want, strict=True):
        assert got.requires_grad or mode == "nearest"  # linear in grad_output
        torch.testing.assert_close(got, stock, rtol=1e-12, atol=1e-12)


@every_kind
def test_forward_mode_has_the_stock_value(dim, mode, padding, align):
    image, _ = tensors(dim)
    grid = kinks(dim)
    fn = sample(mode, padding, align)
    value, _ = torch.func.jvp(fn, (image, grid), (image, grid))
    torch.testing.assert_close(value, fn(image, grid), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_transforms(mode, padding):
    image, grid = tensors(2)
    tangents = (torch.randn_like(image), torch.randn_like(grid))

    def results(fn):
        def loss(x: Tensor, g: Tensor) -> Tensor:
            return torch.tanh(fn(x, g)).square().sum()

        grad = torch.func.grad(loss, (0, 1))
        return [
            torch.func.jvp(fn, (image, grid), tangents)[1],
            *torch.func.jvp(grad, (image, grid), tangents)[1],
            torch.func.hessian(loss, 1)(image[:1], grid[:1]),
            torch.func.jacfwd(torch.func.jacfwd(loss, 1), 1)(image[:1], grid[:1]),
            *torch.func.vmap(grad)(image[:, None], grid[:, None]),
            *torch.func.vmap(grad, (0, None))(image[:, None], grid[:1]),
            *torch.func.vmap(grad, (None, 0))(image[:1], grid[:, None]),
            torch.func.grad(lambda g: torch.func.vmap(fn)(image[:, None], g).pow(2).sum())(
                grid[:, None]
            ),
        ]

    got, want = (results(f(mode, padding, False)) for f in (sample, formula))
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_other_dtypes(dtype, tolerance, mode):
    """The derivatives alone: stock's value is of coordinates rounded to bfloat16."""
    inputs = [t.requires_grad_() for t in tensors(2, dtype)]
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 2, 2, 3), *(t.shape for t in inputs)]
    cotangents = [torch.randn(s, generator=generator).to(dtype) for s in shapes]

    def results(fn, inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
        of_output, *of_gradients = cotangents
        got = first(fn, inputs, of_output, create_graph=True)
        return [*got, *torch.autograd.grad(got, inputs, of_gradients)]

    got = results(sample(mode, "reflection", False), inputs, cotangents)
    assert all(t.dtype == dtype for t in got)
    exact = (
        [t.detach().double().requires_grad_() for t in inputs],
        [t.double() for t in cotangents],
    )
    want = results(formula(mode, "reflection", False), *exact)
    assert worst_error([t.detach() for t in got], [t.detach() for t in want]) < tolerance


@pytest.mark.parametrize("size", [(0, 2, 4, 5), (2, 0, 4, 5)])
def test_empty(size):
    image = torch.randn(size, dtype=torch.float64)
    grid = torch.rand(size[0], 3, 2, 2, dtype=torch.float64)
    results = derivatives(sample("bilinear", "zeros", False), [image, grid], 2)
    assert [t.shape for t in results[-2:]] == [image.shape, grid.shape]
    assert not any(t.any() for t in results[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_points_that_are_nowhere(bad):
    """They have no part in any derivative. (Stock's first is NaN there, or ends the process.)"""
    image, grid = tensors(2)
    grid[0, 0, 0] = bad
    inputs = [image.requires_grad_(), grid.requires_grad_()]
    fn = sample("bilinear", "zeros", False)
    got = first(fn, inputs, torch.ones(2, 2, 2, 3, dtype=torch.float64), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in got), inputs)
    for gradient in (*got, *second):
        assert gradient.isfinite().all()
    assert not got[1][0, 0, 0].any() and not second[1][0, 0, 0].any()


def test_input_written_in_place_and_channels_last():
    image, grid = tensors(2)

    def written(x: Tensor, g: Tensor) -> Tensor:
        x = (x * 1).to(memory_format=torch.channels_last)
        x[:, 0] = x[:, 1] * 2
        F.elu_(x)
        g = g * 1
        g[..., 0].mul_(0.9)
        return sample("bilinear", "border", False)(x, g)

    def plain(x: Tensor, g: Tensor) -> Tensor:
        x = F.elu(torch.stack([x[:, 1] * 2, x[:, 1]], 1))
        g = torch.stack([g[..., 0] * 0.9, g[..., 1]], -1)
        return formula("bilinear", "border", False)(x, g)

    got, want = (derivatives(f, (image, grid), 2) for f in (written, plain))
    assert worst_error(got, want) < 1e-10


def test_a_spatial_transformers_penalty():
    theta = torch.randn(2, 2, 3, dtype=torch.float64) * 0.3
    image, _ = tensors(2)

    def penalty(fn):
        x, t = image.clone().requires_grad_(), theta.clone().requires_grad_()
        grid = F.affine_grid(t, [2, 2, 6, 6], align_corners=False)
        y = torch.tanh(fn(x, grid)).mean()
        (gx,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(gx.square().sum(), [x, t])

    got, want = (penalty(f("bilinear", "zeros", False)) for f in (sample, formula))
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize(
    "name", ["nn.functional.grid_sample", "grid_sampler_2d", "grid_sampler_3d"]
)
def test_the_operator_databases_samples(name):
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = (o for o in op_db if o.name == name)
    for s in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        if s.input.numel() > 100_000:  # the same modes over millions of elements, for minutes
            continue
        grid = s.args[0]

        def fn(x: Tensor, g: Tensor, s=s) -> Tensor:
            return op(x, g, *s.args[1:], **s.kwargs)

        inputs = (s.input, grid.detach().requires_grad_())
        assert torch.autograd.gradgradcheck(fn, inputs, fast_mode=True)
        assert torch.autograd.gradcheck(
            fn, inputs, fast_mode=True, check_forward_ad=True, check_batched_grad=False
        )
