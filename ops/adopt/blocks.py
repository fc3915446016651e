"""Blocks of somebody's model whose sums are computed by the norms that follow, also across the border of two blocks.

    x = x + drop(attn(norm1(x)))        norm1 adds what the block before hands on, and norms the sum: one kernel
    x = x + drop(mlp(norm2(x)))         norm2 drops, adds and norms: one kernel
    return x                            a Pending: the sum of mlp's output is left to the next block's norm1

The block keeps its own forward, its class and its parts. Hooks on it and on its sublayers put a Stream and Branches in the
place of tensors (`lazy` says what they do), where `trial` found that a kernel can use them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .lazy import Branch, Pending, Stream, check_outside_function, settled
from .norms import AdoptedNorm, Hook, Swapped, is_sharded, replace_norms, take_hooks_off, unswap
from .trial import Trial, try_block


@dataclass(frozen=True)
class BlockLayout:
    """What a block calls its parts: x + dropout1(mixer(norm1(x))), then x + dropout2(mlp(norm2(x)))."""

    norm1: str
    mixer: str  # attention, or what is in its place
    norm2: str
    mlp: str
    dropout1: str | None = None  # the nn.Dropout that mixer's output goes through last; dotted where it is inside
    dropout2: str | None = None  # and mlp's


# nanoGPT's, and transformers' GPT-2; Llama's, Mistral's, Qwen2's and Qwen3's
GPT2_BLOCK = BlockLayout("ln_1", "attn", "ln_2", "mlp", "attn.resid_dropout", "mlp.dropout")
LLAMA_BLOCK = BlockLayout("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


def fuse_prenorm_block(
    block: nn.Module, layout: BlockLayout | None = None, *, residual_in_fp32: bool = False
) -> Trial | list[Trial]:
    """Lets the norms of a block, or of each of a stack, compute its residual sums, in place. `restore_norms(model)` undoes it.

    The norms inside are replaced too. `adopt` finds the blocks of a model by itself; this is for one stack, or to insist.

    Args:
        block: any block whose forward takes the stream first. Or an nn.ModuleList or nn.Sequential of such blocks: all are
            fused, or none. The last block's sum is left to whatever comes next: a Pending, which takes part in a program as
            the tensor that it stands for.
        layout: what has to be fused; None: whatever can be.
        residual_in_fp32: keep the stream in fp32 if it begins in this block, that is, if its x is a tensor.

    Returns:
        What was found, of each block of a stack.

    Raises:
        TypeError: block is no module, or layout no BlockLayout.
        ValueError: nothing in the block can be fused, or not all that layout names. It stays as it was.
    """
    if not isinstance(block, nn.Module):
        raise TypeError(f"fuse_prenorm_block: block must be a torch.nn.Module, got {type(block).__name__}")
    if layout is not None and not isinstance(layout, BlockLayout):
        raise TypeError(f"fuse_prenorm_block: layout must be a BlockLayout, such as LLAMA_BLOCK, got {type(layout).__name__}")
    before = {module for module in block.modules() if isinstance(module, Swapped)}
    stack = is_stack(block)
    blocks = [one for one in dict.fromkeys(block.children()) if type(one) is not nn.Identity] if stack else [block]
    if not blocks:
        raise ValueError(f"fuse_prenorm_block: {type(block).__name__} has no blocks")
    found: list[Trial] = []
    for i, one in enumerate(blocks):
        name = f"fuse_prenorm_block({type(one).__name__})"
        if is_fused(one):
            problem = f"{name}: block is fused already; restore_norms undoes it"
        else:
            sites = replace_norms(one, verbose=False)
            trial = try_block(one)
            problem = trial if isinstance(trial, str) else _missing(one, trial, layout, {site.name: site.why for site in sites})
            problem = problem and f"{name}: {problem}"
        if problem:
            for fused in blocks[:i]:
                unfuse(fused)
            for module in {module for module in block.modules() if isinstance(module, Swapped)} - before:
                unswap(module)
            raise ValueError(f"{problem}. It is block {i} of {len(blocks)}, and all stay as they were" if stack else problem)
        assert isinstance(trial, Trial)
        fuse(one, trial, residual_in_fp32)
        found.append(trial)
    return found if stack else found[0]


def _missing(block: nn.Module, trial: Trial, layout: BlockLayout | None, why: dict[str, str]) -> str:
    """What the layout names and the trial did not find."""
    for part, path in vars(layout).items() if layout else ():
        try:
            module = None if path is None else block.get_submodule(path)
        except AttributeError:
            children = ", ".join(child for child, _ in block.named_children()) or "none"
            return f"block has no {path!r}, layout.{part}; its parts are {children}"
        if part == "norm1" and path not in trial.norms:
            return f"layout.norm1, {path}, {_no_sum(module, why.get(path, ''))}"
        if part == "norm2" and path not in trial.norms:
            return f"layout.norm2, {path}, {_no_sum(module, why.get(path, ''))}"
        if part.startswith("dropout") and module is not None and not isinstance(module, nn.Dropout):
            return f"layout.{part}, {path}, is a {type(module).__name__}, expected an nn.Dropout"
    return ""


def _no_sum(norm: nn.Module | None, why: str) -> str:
    if isinstance(norm, AdoptedNorm):
        return "norms no sum that can be computed along with it"
    return f"can't be replaced: {why or f'it is a {type(norm).__name__}'}"


def fuse(block: nn.Module, trial: Trial, residual_in_fp32: bool = False) -> None:
    """Hooks a block as the trial says."""
    block.register_forward_pre_hook(Enter(trial.argument, trial.width, residual_in_fp32), with_kwargs=True)
    for path in trial.plain:
        block.get_submodule(path).register_forward_pre_hook(SettleArguments(), with_kwargs=True)
    for path in trial.parts:
        block.get_submodule(path).register_forward_hook(MakeBranch(trial.width, block), prepend=True)
    for path in trial.feeds:
        part = block.get_submodule(path)
        for dropout in part.modules():
            if type(dropout) is nn.Dropout and dropout is not part and not has_hook(dropout, DropLater):
                dropout.register_forward_pre_hook(DropLater(trial.width, block))
    block.register_forward_hook(Leave(), prepend=True)


def unfuse(block: nn.Module) -> None:
    for module in block.modules():
        take_hooks_off(module)


def is_fused(block: nn.Module) -> bool:
    return has_hook(block, Enter)


def has_hook(module: nn.Module, kind: type) -> bool:
    return any(isinstance(hook, kind) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))


@dataclass(frozen=True)
class Enter(Hook):
    """A block's stream as a Stream."""

    argument: str
    width: int
    in_fp32: bool

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (self._stream(args[0], block), *args[1:]), kwargs
        if self.argument in kwargs:
            return args, {**kwargs, self.argument: self._stream(kwargs[self.argument], block)}
        return args, kwargs

    def _stream(self, x: Any, block: nn.Module) -> Any:
        if block.training and getattr(block, "gradient_checkpointing", False):
            # transformers' layers, whose forward runs a second time in backward: with what this hook gives now.
            x = settled(x)
            if _is_reentrant(block):
                return x
        if isinstance(x, Pending):
            check_outside_function(x)
            return Stream(x.residual, x.branch, x.factor, x.in_fp32)
        x = settled(x)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1:] != (self.width,) or x.is_nested:
            return x
        return Stream(x, in_fp32=self.in_fp32 and x.dtype != torch.float32)


def _is_reentrant(block: nn.Module) -> bool:
    """Whether transformers runs the forward of this layer in an autograd.Function, which takes and gives tensors alone."""
    if not (block.training and getattr(block, "gradient_checkpointing", False)):
        return False
    return bool(getattr(getattr(block, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant"))


class Leave(Hook):
    """What a block returns: Pendings in place of Streams, and tensors of Branches."""

    def __call__(self, block: nn.Module, args: tuple, output: Any) -> Any:
        if type(output) is tuple:
            return tuple([_left(block, one, args) for one in output])
        return _left(block, output, args)


def _left(block: nn.Module, x: Any, args: tuple) -> Any:
    if not isinstance(x, Stream) or x._value is not None or x.branch is None or _in_reentrant_checkpoint(args):
        return settled(x)
    if x.branch.holds_weights() and is_sharded(block):  # they are gone when the next block runs
        return x.tensor()
    x.branch.fix_mask()
    return Pending(x.residual, x.branch, x.factor, x.in_fp32)


def _in_reentrant_checkpoint(args: tuple) -> bool:
    """Whether an autograd.Function runs the block, whose output has to be a tensor: without gradients, or from a leaf."""
    if torch.compiler.is_compiling():
        return False
    x = args[0] if args else None
    x = x.residual if isinstance(x, Stream) else x
    return isinstance(x, Tensor) and x.requires_grad and (x.is_leaf or not torch.is_grad_enabled())


class SettleArguments(Hook):
    """A sublayer gets tensors."""

    def __call__(self, part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return settled(args), settled(kwargs)


@dataclass(frozen=True, eq=False)
class MakeBranch(Hook):
    """A sublayer's output as a Branch."""

    width: int
    block: nn.Module = field(repr=False)

    def __call__(self, part: nn.Module, args: Any, output: Any) -> Any:
        if _is_reentrant(self.block):
            return output
        if type(output) is tuple and output:
            return (as_branch(output[0], self.width), *output[1:])
        return as_branch(output, self.width)


def as_branch(x: Any, width: int) -> Any:
    fits = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.shape[-1] == width
    return Branch(x) if fits and not x.is_nested else x


@dataclass(frozen=True, eq=False)
class DropLater(Hook):
    """What a dropout inside a sublayer gets as a Branch, which drops when it is added, or when it is used."""

    width: int
    block: nn.Module = field(repr=False)

    def __call__(self, dropout: nn.Module, args: tuple) -> Any:
        if (
            _is_reentrant(self.block)
            or not dropout.training
            or dropout.p == 0.0
            or len(args) != 1
            or not isinstance(args[0], Tensor)
        ):
            return None
        return as_branch(args[0], self.width)


class SettleOutput(Hook):
    """A model returns tensors."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, dict) and type(output) is not dict:  # transformers' ModelOutput
            for name, value in list(output.items()):
                if (tensors := settled(value)) is not value:
                    output[name] = tensors
            return output
        return settled(output)


def is_stack(module: nn.Module) -> bool:
    """Whether it is a container of modules: one without a forward of its own."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward
