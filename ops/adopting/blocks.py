"""What runs around a fused block's own forward and around its sublayers. The block keeps its forward, its name and its parts.

    x = x + drop(attn(norm1(x)))        norm1 and the stream x past it are one node: one kernel adds up both gradients of x
    x = x + drop(mlp(norm2(x)))         drop, + and norm2 are one kernel
    return x                            drop and + are one kernel

What enters and leaves the block is a tensor, and so is what a part gives that has hooks, or that is called by anybody but the
block's forward. Hooks of the block run around all of this.
"""

import threading
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_state import has_hooks, saved_through
from .adopted import Adopted, become
from .lazy import Lazy, Role, can_go_along, look_ahead, settled, under_autocast

_HOOK: Any = "prenorm"  # its key among a part's hooks: the same in all blocks, or else Dynamo compiles each block anew


class _Running(threading.local):
    """Of the innermost block whose own forward runs, where that is no compiled graph: the block, its `_mode`, `Lazy.past`."""

    call: tuple = None, None, None


_running = _Running()


@dataclass(eq=False)
class Source:
    """A hook of a part: its output becomes a `Lazy`, or its input. A bound method of it can be copied and pickled."""

    block: Any  # an AdoptedBlock
    role: Role

    def enter(self, part: nn.Module, args: tuple) -> Any:
        lazy = self._lazy(part, args[0]) if args else None
        return None if lazy is None else (lazy, *args[1:])

    def leave(self, part: nn.Module, args: Any, output: Any) -> Any:
        if type(output) not in (tuple, list) or not output:
            return self._lazy(part, output)
        lazy = self._lazy(part, output[0])
        return None if lazy is None else type(output)([lazy, *output[1:]])

    def _lazy(self, part: nn.Module, x: Any) -> Lazy | None:
        """x as a Lazy, if the block's forward called the part, and nobody else sees it or a module that it goes through."""
        block, role, past = self.block, self.role, None
        if not torch.compiler.is_compiling():
            block, mode, past = _running.call
            if mode != _mode():
                return None
        fitting = part_of(block, role.path) is part and fits(x, block._plan.width) and x.dim() > 1
        if not fitting or has_hooks(part, _HOOK):
            return None
        for path in role.passes:
            other = part_of(block, path)
            if other is None or has_hooks(other):
                return None
        return Lazy(x, (role,), part_of(block, role.next_norm) if role.next_norm else None, past)


def fits(x: Any, width: int) -> bool:
    """Whether it is a stream of rows of this width."""
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested and x.dim() > 0 and x.shape[-1] == width


def part_of(block: nn.Module, path: str) -> Any:
    """Its part of this path, None where it has none any more. `get_submodule` takes several times as long."""
    part: Any = block
    for name in path.split("."):
        part = part._modules.get(name)
        if part is None:
            return None
    return part


def _mode() -> tuple:
    """Whether gradients are recorded, and which checkpoint this is in: another one in a part of the block."""
    return torch.is_grad_enabled(), saved_through()


def _with_norm_ahead(block: "AdoptedBlock", x: Any) -> Any:
    """The stream that the block gets, with what its first norm will give."""
    plan, dtype = block._plan, getattr(x, "dtype", None)
    if not (plan.enters or block._in_fp32) or not fits(x, plan.width):
        return x
    if block._in_fp32:
        dtype, x = next(block.parameters(), x).dtype, x.float()
    norm: Any = part_of(block, plan.enters) if plan.enters else None
    if norm is None or not can_go_along(norm) or not x.is_contiguous():
        return x
    own, dtype = norm.out_dtype(x.dtype), under_autocast(norm, norm.out_dtype(dtype), x, plan.follows)
    one_node = torch.is_grad_enabled() and x.requires_grad and not torch.compiler.is_compiling()
    return look_ahead(norm, x, dtype, {}) if one_node or dtype is not own else x


class AdoptedBlock(Adopted):
    """A block of somebody's model whose sums are computed in the kernels of its norms."""

    _plan: Any  # a `trial.Trial`
    _in_fp32: bool  # the stream

    @classmethod
    def _made(cls, own: Any, how: Any, recognised: Any) -> dict[str, Any]:
        @wraps(own.forward)
        def forward(self: AdoptedBlock, *args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs.get(self._plan.argument)
            r = _with_norm_ahead(self, x)
            if r is not x:  # in each place where the block gets x: it may ask whether two are one
                args = tuple([r if t is x else t for t in args])
                kwargs = {name: r if t is x else t for name, t in kwargs.items()}
            if torch.compiler.is_compiling():
                return settled(own.forward(self, *args, **kwargs))  # which a tool may have replaced since
            around, _running.call = _running.call, (self, _mode(), {})
            try:
                return settled(own.forward(self, *args, **kwargs))
            finally:
                _running.call = around

        return {"forward": forward}

    def _give_back(self) -> None:
        for module in self.modules():
            module._forward_hooks.pop(_HOOK, None)
            module._forward_pre_hooks.pop(_HOOK, None)


def fuse(block: Any, plan: Any, residual_in_fp32: bool = False) -> None:
    """Raises TypeError if Python can't give the block's class a subclass."""
    become(block, AdoptedBlock, _plan=plan, _in_fp32=residual_in_fp32)
    for role in plan.roles:
        source, part = Source(block, role), block.get_submodule(role.path)
        hooks = part._forward_pre_hooks if role.takes else part._forward_hooks
        hooks[_HOOK] = _of_several_blocks if _HOOK in hooks else source.enter if role.takes else source.leave


def _of_several_blocks(part: nn.Module, *call: Any) -> None:
    """The hook of a part that blocks share: what it gives is a tensor."""
