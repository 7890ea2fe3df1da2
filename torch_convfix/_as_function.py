"""A function of modules and tensors as a function of tensors alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_TENSORS = ("_parameters", "_buffers")
_TENSOR = object()  # in the place of a tensor, which the caller may let go


def as_function(
    fn: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """``fn(*inputs)`` as a function of tensors alone, and those: modules' parameters and buffers first.

    The modules are those of now, whatever becomes of them. The function writes to copies of the buffers;
    with ``copies=False`` to those it is given, and what it assigns to a module's attribute is assigned.
    """
    parts, spec = pytree.tree_flatten((fn, list(inputs)))
    modules = [part for part in parts if isinstance(part, nn.Module)]
    owned = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}
    tensors = [*owned.values(), *(part for part in parts if isinstance(part, Tensor))]
    now = _Copies(owned)
    parts = [_TENSOR if isinstance(part, Tensor) else now.of(part) for part in parts]

    def function(tensors: Sequence[Any], *, copies: bool = True) -> Any:
        given = iter(tensors)
        # A buffer may be written to, and what was given must stay; a copy of one that has a gradient
        # needs none: it can't be written to.
        own = {
            key: next(given).clone() if copies and not t.requires_grad else next(given)
            for key, t in owned.items()
        }
        bound = _Copies(own)
        leaves = [next(given) if part is _TENSOR else bound.of(part) for part in parts]
        fn, args = pytree.tree_unflatten(leaves, spec)
        result = fn(*args)
        if not copies:
            for original, copy in now.made.values():
                if id(copy) in bound.made:
                    bound.assign(copy, original)
        return result

    return function, tensors


class _Copies:
    """Copies of modules, with other tensors in the place of theirs, by their ids."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[int, tuple[nn.Module, nn.Module]] = {}
        self.attributes: dict[int, dict[str, Any]] = {}

    def of(self, part: Any) -> Any:
        """A module's copy, and so within; anything else as it is."""
        if not isinstance(part, nn.Module):
            return part
        if isinstance(part, torch.jit.ScriptModule):
            raise NotImplementedError(
                "a torch.jit.ScriptModule cannot be a function of its tensors: give the nn.Module"
            )
        compiled = part._modules.get("_orig_mod")  # torch.compile's, whose code knows the original
        if compiled is not None:
            return self.of(compiled)
        if id(part) not in self.made:
            # Not by copy.copy: a parametrized module refuses it. Nor by its class: fx makes another.
            own = object.__new__(type(part))
            self.made[id(part)] = part, own
            own.__dict__ = {name: self._attribute(value) for name, value in vars(part).items()}
            own._modules = {name: self.of(m) for name, m in part._modules.items()}
            for name in _TENSORS:
                tensors = getattr(part, name).items()
                setattr(own, name, {n: t if t is None else self.tensors[id(t)] for n, t in tensors})
            self.attributes[id(part)] = _attributes(own)
        return self.made[id(part)][1]

    def _attribute(self, value: Any) -> Any:
        """As a recurrent layer keeps a list of its weights."""
        if not isinstance(value, (Tensor, list, tuple)) or not any(
            id(t) in self.tensors for t in pytree.tree_leaves(value)
        ):
            return value
        return pytree.tree_map(lambda t: self.tensors.get(id(t), t), value)

    def assign(self, module: nn.Module, to: nn.Module) -> None:
        """What was assigned to attributes and buffers of the module's copy since it was made."""
        before = self.attributes[id(module)]
        own_tensors = {id(t) for t in self.tensors.values()}
        for name, value in _attributes(self.made[id(module)][1]).items():
            if name in before and before[name] is value:
                continue
            tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
            if name in to._buffers:
                to._buffers[name] = value
            elif tensors and own_tensors.issuperset(map(id, tensors)):
                pass  # as a recurrent layer lists its weights anew
            elif tensors:
                raise ValueError(
                    f"function must return what it computes: {type(to).__name__} keeps a tensor as "
                    f".{name}, of which a derivative would not be known"
                )
            else:
                vars(to)[name] = value


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {name: v for name, v in vars(module).items() if name not in (*_TENSORS, "_modules")}
    return own | module._buffers
