"""A whole model in one call.

print(adopt(model))         model.layers.{0…31}.input_layernorm: 32 × LlamaRMSNorm(4096), with the add before it
adopt(model).undo()
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from .hooks import BlockHooks, is_fused, settle_arguments, settle_output
from .loss import calls_loss, replace_loss, restore_loss
from .norms import AdoptedNorm, Site, replace_norms, restore, restore_norms
from .rotary import replace_rotary, restore_rotary
from .trial import Trial, try_block


@dataclass
class Adoption:
    """What `adopt` did; str is a table of it."""

    model: nn.Module
    norms: list[Site]
    blocks: dict[str, Trial] = field(default_factory=dict)  # by the block's name in the model
    left: dict[str, str] = field(default_factory=dict)  # blocks that stay as they are, and why
    rotary: list[tuple[str, str]] = field(default_factory=list)  # names of attention modules, and what was done there
    loss: str = ""
    functions: list[str] = field(default_factory=list)  # norms that are calls in a forward, which stay as they are

    def undo(self) -> None:
        """Gives the model back its own norms, sums and loss; its parameters keep their values."""
        restore_rotary(self.model)
        restore_norms(self.model, verbose=False)
        restore_loss(self.model, verbose=False)

    def __str__(self) -> str:
        along = {
            f"{block}.{path}" if path else block: f"with {', '.join(('the add before it', *features))}"
            for block, trial in self.blocks.items()
            for path, features in trial.norms.items()
        }
        lines = [
            (site.name, f"{site.was}, {along.get(site.name, 'fused') if site.fused else f'left alone: {site.why}'}")
            for site in self.norms
        ]
        for name, why in self.left.items():
            lines.append((name, f"{type(self.model.get_submodule(name)).__name__}, sums left alone: {why}"))
        return (
            "\n".join([*_grouped(lines + self.rotary), *filter(None, [self.loss]), *self.functions])
            or "nothing in it is a norm"
        )


def adopt(
    model: nn.Module,
    *,
    blocks: bool = True,
    rotary: bool = True,
    loss: bool = True,
    only: Callable[[str, nn.Module], bool] | None = None,
    verbose: bool = True,
) -> Adoption:
    """Lets a model run the fused kernels, in place: its norms, the residual sums in its blocks, and its loss.

    Norms are replaced as `replace_norms` says. Then each stack of blocks in the model is looked for, and each block is tried:
    where a norm can compute a residual sum along, it does, with the dropout, scale, drop path or norm that the branch goes
    through. The block keeps its own forward, so its arguments, caches and whatever else it does stay as they are.
    A second call changes nothing.

    Args:
        model: any module; on any device, on meta too. Before DDP, FSDP or torch.compile are put around it.
        blocks: also compute the sums of its blocks in the norms.
        rotary: also turn queries and keys in one kernel, with the norms before (`replace_rotary`).
        loss: also replace `loss_function`, if its forward calls one that is that of transformers' causal language models.
        only: a function of the name and module of each norm, block and attention; what it returns False for is left alone.
        verbose: print the table.

    Returns:
        What was done; `.undo()` undoes it, as do `restore_rotary`, `restore_norms` and `restore_loss`.
    """
    found = Adoption(model, replace_norms(model, only=only, verbose=False))
    for name, block in _blocks(model) if blocks else ():
        parts = list(block.modules())
        has_norms = any(isinstance(part, AdoptedNorm) for part in parts)
        if not has_norms or any(map(is_fused, parts)) or (only and not only(name, block)):
            continue
        trial = try_block(block)
        if isinstance(trial, str):
            found.left[name] = trial
        else:
            _fuse(block, trial)
            found.blocks[name] = trial
    for name, module in model.named_modules():
        holds = any(block.startswith(f"{name}." if name else "") for block in found.blocks)
        if holds and name not in found.blocks and settle_output not in module._forward_hooks.values():
            module.register_forward_hook(settle_output, prepend=True)
    found.rotary = replace_rotary(model, only=only) if rotary else []
    if loss and calls_loss(model):
        try:
            found.loss = replace_loss(model, verbose=False)
        except ValueError as error:
            found.loss = str(error).removeprefix("replace_loss: ")
    found.functions = _functional_norms(model)
    if verbose:
        print(found)
    return found


def fuse_prenorm_block(block: nn.Module, *, residual_in_fp32: bool = False) -> Trial | list[Trial]:
    """Lets the norms of a block, or of each of a stack, compute its residual sums, in place. `restore_norms(model)` undoes it.

    The norms inside are replaced too. `adopt` finds the blocks of a model by itself; this is for one stack, or to insist.

    Args:
        block: any block whose forward takes the stream first. Or an nn.ModuleList or nn.Sequential of such blocks: all are
            fused, or none. The last block's sum is left to whatever comes next: a Pending, which takes part in a program as
            the tensor that it stands for.
        residual_in_fp32: keep the stream in fp32 if it begins in this block, that is, if its x is a tensor.

    Returns:
        What was found, of each block of a stack.

    Raises:
        ValueError: nothing in the block can be fused. It stays as it was.
    """
    stack = _is_stack(block)
    blocks = [one for one in dict.fromkeys(block.children()) if type(one) is not nn.Identity] if stack else [block]
    if not blocks:
        raise ValueError(f"fuse_prenorm_block: {type(block).__name__} has no blocks")
    others = [module for module in block.modules() if not isinstance(module, AdoptedNorm)]
    replace_norms(block, verbose=False)
    trials: list[Any] = ["it is fused already; restore_norms undoes it" if is_fused(one) else try_block(one) for one in blocks]
    if refused := [i for i, trial in enumerate(trials) if isinstance(trial, str)]:
        for module in others:
            if isinstance(module, AdoptedNorm):
                restore(module)
        i = refused[0]
        which = f"It is block {i} of {len(blocks)}, and all stay as they were"
        raise ValueError(f"fuse_prenorm_block({type(blocks[i]).__name__}): {trials[i]}. {which}")
    for one, trial in zip(blocks, trials, strict=True):
        _fuse(one, trial, residual_in_fp32)
    return trials if stack else trials[0]


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in containers, of the inner containers first."""
    seen: set[nn.Module] = set()
    for stack, container in reversed([(name, module) for name, module in model.named_modules() if _is_stack(module)]):
        for child, block in container.named_children():
            if block not in seen and not _is_stack(block) and not isinstance(block, AdoptedNorm):
                seen.add(block)
                yield f"{stack}.{child}" if stack else child, block


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a container of modules: one without a forward of its own."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _fuse(block: nn.Module, trial: Trial, residual_in_fp32: bool = False) -> None:
    hooks = BlockHooks(block, trial.argument, trial.width, residual_in_fp32)
    block.register_forward_pre_hook(hooks.enter, with_kwargs=True)
    for path in trial.plain:
        block.get_submodule(path).register_forward_pre_hook(settle_arguments, with_kwargs=True)
    for path in trial.parts:
        block.get_submodule(path).register_forward_hook(hooks.make_branch, prepend=True)
    for dropout in {m for path in trial.feeds for m in block.get_submodule(path).modules() if type(m) is nn.Dropout}:
        dropout.register_forward_pre_hook(hooks.drop_later)
    block.register_forward_hook(hooks.leave, prepend=True)


def _functional_norms(model: nn.Module) -> list[str]:
    """A line for each class whose forward, or what it calls of its own file, calls F.rms_norm or F.layer_norm."""
    lines: dict[str, None] = {}
    for cls, module in {type(module): module for module in model.modules()}.items():
        if isinstance(module, AdoptedNorm | nn.LayerNorm | nn.RMSNorm) or cls.__module__.startswith("torch."):
            continue
        called: list[Any] = [inspect.unwrap(cls.forward)]
        for function in called:  # which grows
            names = _names(function.__code__) if isinstance(function, FunctionType) else set()
            found = [function.__globals__.get(name) or getattr(cls, name, None) for name in sorted(names)]
            called += [f for f in found if isinstance(f, FunctionType) and f.__module__ == cls.__module__ and f not in called]
            by = "" if function is called[0] else f" by {function.__name__}()"
            for name in sorted({"rms_norm", "layer_norm"} & names):
                if not hasattr(module, name):  # self.layer_norm is a module
                    call = f"{cls.__name__}.forward calls F.{name}{by}, which is no module"
                    lines[f"{call}: call {name}_fn in its place, or use a norm module"] = None
    return list(lines)


def _names(code: CodeType) -> set[str]:
    """That are called or read in a function, and in the functions written in it."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _grouped(lines: list[tuple[str, str]]) -> list[str]:
    """Lines that differ in numbers of their name alone, as one: layers.{0…31}.norm: 32 × …"""
    number = re.compile(r"(?<![^.])\d+(?![^.])")
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for name, what in lines:
        groups.setdefault((number.sub("#", name), what), []).append([int(n) for n in number.findall(name)])
    found = []
    for (pattern, what), numbers in groups.items():
        for column in zip(*numbers, strict=True):
            pattern = pattern.replace("#", _range(sorted(set(column))), 1)
        found.append(f"{pattern}: {f'{len(numbers)} × ' if len(numbers) > 1 else ''}{what}")
    return found


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    consecutive = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{{{numbers[0]}…{numbers[-1]}}}" if consecutive else f"{{{','.join(map(str, numbers))}}}"
