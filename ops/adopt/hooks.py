"""What runs around a fused block and its parts. The block keeps its own forward, its class and its parts.

    x = x + drop(attn(norm1(x)))        norm1 adds what the block before hands on, and norms the sum: one kernel
    x = x + drop(mlp(norm2(x)))         norm2 drops, adds and norms: one kernel
    return x                            a Pending: the sum of mlp's output is left to the next block's norm1

The hooks put a Lazy in the place of a tensor (`lazy` says what it does) where `trial` found that a kernel can use it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .lazy import Lazy, Pending, check_outside_function, settled


@dataclass(frozen=True, eq=False)
class BlockHooks:
    """Of one block, as its bound methods, which can be copied and pickled."""

    block: nn.Module
    argument: str  # the name of the stream
    width: int
    residual_in_fp32: bool

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The stream as a Lazy."""
        if args:
            return (self._stream(args[0]), *args[1:]), kwargs
        if self.argument in kwargs:
            return args, {**kwargs, self.argument: self._stream(kwargs[self.argument])}
        return args, kwargs

    def _stream(self, x: Any) -> Any:
        if isinstance(x, Pending) and not self._is_checkpointed():
            check_outside_function(x)
            return x.then()
        x = settled(x)  # a checkpointed layer then keeps one tensor for its second forward
        if not self._fits(x):
            return x
        if self.residual_in_fp32 and x.dtype != torch.float32:  # the stream begins here
            return Lazy(x, residual=torch.zeros_like(x, dtype=torch.float32))
        return Lazy(residual=x)

    def leave(self, block: nn.Module, args: tuple, output: Any) -> Any:
        """What the block returns: a Pending in place of its stream, and tensors otherwise."""
        if type(output) is tuple:
            return tuple([self._left(block, one, args) for one in output])
        return self._left(block, output, args)

    def _left(self, block: nn.Module, x: Any, args: tuple) -> Any:
        if not isinstance(x, Lazy) or x.residual is None or x.x is None or _in_reentrant_checkpoint(args):
            return settled(x)
        if x.holds_weights() and is_sharded(block):  # they are gone when the next block runs
            return x.tensor()
        return Pending(**{name: getattr(x, name) for name in Lazy.__dataclass_fields__})

    def make_branch(self, part: nn.Module, args: Any, output: Any) -> Any:
        """A sublayer's output as a branch."""
        if type(output) is tuple and output:
            return (self._branch(output[0]), *output[1:])
        return self._branch(output)

    def drop_later(self, dropout: nn.Module, args: tuple) -> Any:
        """What a dropout in a sublayer gets as a branch, which drops when it is added, or when it is used."""
        return self._branch(args[0]) if args and dropout.training and dropout.p else None

    def _branch(self, x: Any) -> Any:
        return Lazy(x) if self._fits(x) and x.dim() > 1 else x

    def _fits(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.is_nested or x.shape[-1:] != (self.width,):
            return False
        # Reentrant checkpointing runs the forward in an autograd.Function, which takes and gives tensors alone.
        how = getattr(self.block, "_gradient_checkpointing_func", None)
        return not (self._is_checkpointed() and getattr(how, "keywords", {}).get("use_reentrant"))

    def _is_checkpointed(self) -> bool:
        """By transformers, which runs the block's forward a second time in backward."""
        return self.block.training and getattr(self.block, "gradient_checkpointing", False)


def _in_reentrant_checkpoint(args: tuple) -> bool:
    """Whether an autograd.Function runs the block, whose output has to be a tensor: without gradients, or from a leaf."""
    if torch.compiler.is_compiling():
        return False
    x = args[0] if args else None
    x = x.residual if isinstance(x, Lazy) else x
    return isinstance(x, Tensor) and x.requires_grad and (x.is_leaf or not torch.is_grad_enabled())


def settle_arguments(part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """A sublayer gets tensors."""
    return settled(args), settled(kwargs)


def settle_output(model: nn.Module, args: Any, output: Any) -> Any:
    """A model returns tensors."""
    return settled(output)


def is_fused(block: nn.Module) -> bool:
    return any(getattr(hook, "__func__", None) is BlockHooks.enter for hook in block._forward_pre_hooks.values())


def take_hooks_off(module: nn.Module) -> None:
    for hooks, with_kwargs in (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_with_kwargs),
    ):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", None) == __name__]:
            del hooks[key]
            with_kwargs.pop(key, None)


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was called on it: its weights are there during its own forward alone."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
