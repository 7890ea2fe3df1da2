"""Trace a step on one of the stacks, with our kernels or the stack's own, and compile it."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from torch_convfix import _devices
from torch_convfix._as_function import as_function
from torch_convfix.tpu import _compiler, _environment, report
from torch_convfix.tpu._origin import Origin

Stack = Literal["torch_xla", "torch_tpu", "jax"]
Kernels = Literal["ours", "merged", "stock"]
STACKS = ("torch_xla", "torch_tpu", "jax")
KERNELS = ("ours", "merged", "stock")
_DEVICES = {"torch_xla": "xla", "torch_tpu": "tpu"}


def _choose(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def default_stack() -> Stack:
    """The PyTorch stack that is installed here."""
    for stack in ("torch_xla", "torch_tpu"):
        if _devices.is_installed(stack):
            return stack  # type: ignore[return-value]
    raise ImportError("tracing for a TPU needs torch_xla or torch_tpu: `pip install torch_xla`")


def trace(
    fn: Callable[..., Any], inputs: Sequence[Tensor], stack: Stack, kernels: Kernels
) -> tuple[str, dict[str, Origin]]:
    """StableHLO of ``fn(*inputs)``, and the origins that its operators' names begin with."""
    _choose("stack", stack, STACKS)
    _choose("kernels", kernels, KERNELS)
    if stack == "jax":
        return _trace_jax(fn, inputs), {}

    def step(*args: Tensor) -> Sequence[Any]:
        result = fn(*args)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if not tensors:
            raise ValueError(f"fn must return tensors, got {type(result).__name__} without any")
        return tensors

    device = _DEVICES[stack]
    chosen: contextlib.AbstractContextManager[None] = (
        _devices.disabled(device)
        if kernels == "stock"
        else _devices.enabled(
            device, hardware="tpu", grouped="merge" if kernels == "merged" else "direct"
        )
    )
    with chosen:
        if stack == "torch_xla":
            from torch_convfix.tpu import torch_xla

            return torch_xla.trace_with_origins(step, inputs)
        from torch_convfix.tpu import torch_tpu

        return torch_tpu.trace_with_origins(step, inputs)


def _trace_jax(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> str:
    _environment.prepare()
    import jax

    shapes = [
        jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in inputs
    ]
    return jax.jit(fn).lower(*shapes).as_text(debug_info=True)


def compile(
    fn: Callable[..., Any],
    *inputs: Any,
    topology: str = "v5e",
    stack: Stack | None = None,
    kernels: Kernels = "ours",
    name: str | None = None,
) -> report.Report:
    """Compile ``fn(*inputs)`` for a TPU that need not be there, and say what it costs.

    Args:
        fn: a module, or a function of tensors and modules, that returns tensors, for example the
            gradients of a penalty on gradients. All that it computes with must come in by ``inputs``:
            what it closes over is on another device.
        inputs: on CPU, tensors, modules, and lists and dictionaries of them. Only shapes, dtypes and
            ``requires_grad`` of tensors and parameters matter.
        topology: ``v2``, ``v3``, ``v4``, ``v5e``, ``v5p``, ``v6e``, ``v7``, or a name of the
            compiler's own such as ``v5e:2x2``. One device of it is compiled for.
        stack: ``"torch_xla"``, ``"torch_tpu"``, or ``"jax"`` for a function of JAX arrays. By
            default the PyTorch stack that is installed.
        kernels: ``"ours"``, ``"merged"`` (ours with ``grouped="merge"``), or ``"stock"``.
        name: what the report calls it.

    Raises:
        CompileError: with the compiler's message.
        ValueError: for an unknown option.
        ImportError: where jax, libtpu or the stack is missing.
    """
    stack = stack or default_stack()
    _compiler.check(topology)
    function, tensors = as_function(fn, inputs)
    start = time.perf_counter()
    stablehlo, origins = trace(lambda *given: function(given), tensors, stack, kernels)
    seconds = time.perf_counter() - start
    return report.make_report(
        *_compiler.compile_stablehlo(stablehlo, topology),
        stablehlo,
        origins,
        name=name or str(getattr(fn, "__name__", type(fn).__name__)),
        stack=stack,
        kernels="jax" if stack == "jax" else kernels,
        topology=topology,
        trace_seconds=seconds,
    )
