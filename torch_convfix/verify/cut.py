"""A target cut short: the function that ends after one of its calls, and the shortest that is wrong."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from torch_convfix.verify.calls import Recorded, Watch, name_of, tensors_of, transforms_around


class OtherCallsError(Exception):
    """The device is given other calls than the CPU."""


class _End(BaseException):
    """Ends the target, whatever it catches, with these results."""

    def __init__(self, outputs: Sequence[Tensor]):
        super().__init__()
        self.outputs = outputs


class _Cut(Watch):
    def __init__(self, last: Recorded):
        super().__init__()
        self._last = last
        self._held: dict[tuple[int, int], Tensor] = {}
        self._ended = False

    def call(
        self, index: int, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], custom: str
    ) -> Any:
        result = fn(*args, **kwargs)
        if self._ended:  # in a transform that the end leaves
            return result
        tensors = tensors_of(args, kwargs, result)
        for slot in self._last.live:
            if slot[0] == index and slot[1] < len(tensors):
                self._held[slot] = tensors[slot[1]]
        if index == self._last.index:
            if len(self._held) < len(self._last.live) or name_of(fn, custom) != self._last.name:
                raise OtherCallsError(str(self._last))
            self._ended = True
            raise _End(_with_tangents([self._held[slot] for slot in self._last.live]))
        return result


class Target:
    """A function of tensors, whole or up to a call; ``made`` are the leaves that it made last.

    Up to a call, it returns what that call and those before it gave and no call has used yet, written
    in place or not, as the transforms of torch.func around the call see it.
    """

    def __init__(self, function: Callable[..., Any], last: Recorded | None = None):
        self._function = function
        self._last = last
        self.made: list[Tensor] = []
        self.diverged = False  # it was given other calls than those that were recorded

    def __call__(self, *args: Any) -> Any:
        watch = Watch() if self._last is None else _Cut(self._last)
        try:
            with watch.watching(), _transforms_that_end():
                return self._function(*args)
        except _End as end:
            return end.outputs
        except OtherCallsError:
            self.diverged = True
            raise
        finally:
            self.made = watch.made


def first_wrong(calls: Sequence[Recorded], is_wrong: Callable[[Recorded], bool]) -> int | None:
    """A call up to which the target is wrong, while up to the call before it is right, by bisection.

    None if it is right up to the last one that was tried. Where a later call repairs what an earlier one
    breaks, it need not be the first.
    """
    right, wrong = -1, len(calls)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_wrong(calls[middle]):
            wrong = middle
        else:
            right = middle
    return wrong if wrong < len(calls) else None


def _with_tangents(tensors: list[Tensor]) -> list[Tensor]:
    """And their tangents, where the target has a level of `torch.autograd.forward_ad` of its own."""
    if forward_ad._current_level < 0 or transforms_around():
        return tensors
    duals = [forward_ad.unpack_dual(t) for t in tensors]
    return [*(d.primal for d in duals), *(d.tangent for d in duals if d.tangent is not None)]


def _scalar(tensors: Sequence[Tensor]) -> Tensor:
    """A function of all their elements none of whose derivatives up to the second is zero."""
    terms = []
    for t in tensors:
        t = torch.view_as_real(t) if t.is_complex() else t
        places = torch.arange(t.numel(), device=t.device)
        weights = ((places * 7 % 13).to(t.dtype) - 6.5) / 4  # exact in every dtype
        terms.append((weights.reshape(t.shape) * (t + t * t / 2)).sum())
    return torch.stack(terms).sum()


class _Ending:
    """A function within a transform: where it ends early, the transform still does its work."""

    def __init__(self, function: Callable[..., Any], reduce: Callable[..., Any], has_aux: bool):
        self._function, self._reduce, self._has_aux = function, reduce, has_aux
        self.ended = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except _End as end:
            self.ended = True
            result = self._reduce(end.outputs)
            return (result, ()) if self._has_aux else result


@contextlib.contextmanager
def _transforms_that_end() -> Iterator[None]:
    """torch.func's transforms, whose results an end within them returns in place of what it had."""
    gradient, vjp = eager_transforms.grad_and_value_impl, eager_transforms._vjp_with_argnums
    jvp, vmap = eager_transforms._jvp_with_argnums, apis.vmap_impl

    def ending_gradient(func: Any, argnums: Any, has_aux: bool, *rest: Any) -> Any:
        ending = _Ending(func, _scalar, has_aux)
        result = gradient(ending, argnums, has_aux, *rest)
        if ending.ended:
            raise _End(tensors_of(result))
        return result

    def ending_vjp(func: Any, *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
        ending = _Ending(func, _scalar, has_aux)
        result = vjp(ending, *primals, argnums=argnums, has_aux=has_aux)
        if ending.ended:
            raise _End([result[0], *tensors_of(result[1](torch.ones_like(result[0])))])
        return result

    def ending_jvp(func: Any, *args: Any, has_aux: bool, **kwargs: Any) -> Any:
        ending = _Ending(func, tuple, has_aux)
        result = jvp(ending, *args, has_aux=has_aux, **kwargs)
        if ending.ended:
            raise _End(tensors_of(result))
        return result

    def ending_vmap(func: Any, *args: Any, **kwargs: Any) -> Any:
        def within(*batched: Any, **kwargs: Any) -> Any:
            try:
                return func(*batched, **kwargs)
            except _End as end:
                vmap: Any = retrieve_current_functorch_interpreter()
                size, level = vmap.batch_size(), vmap.level()
                remove = torch._C._functorch._remove_batch_dim  # type: ignore[attr-defined]
                raise _End([remove(t, level, size, 0) for t in end.outputs]) from None

        return vmap(within, *args, **kwargs)

    with (
        mock.patch.object(eager_transforms, "grad_and_value_impl", ending_gradient),
        mock.patch.object(eager_transforms, "_vjp_with_argnums", ending_vjp),
        mock.patch.object(eager_transforms, "_jvp_with_argnums", ending_jvp),
        mock.patch.object(apis, "vmap_impl", ending_vmap),
    ):
        yield
