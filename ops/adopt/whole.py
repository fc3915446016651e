"""A whole model in one call.

print(adopt(model))         model.layers.{0…31}.input_layernorm: 32 × LlamaRMSNorm(4096), with the add before it
adopt(model).undo()
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .blocks import SettleOutput, fuse, has_hook, is_fused, is_stack
from .loss import replace_loss, restore_loss
from .norms import AdoptedNorm, Site, replace_norms, restore_norms
from .trial import Trial, try_block


@dataclass
class Adoption:
    """What `adopt` did; str is a table of it."""

    model: nn.Module
    norms: list[Site]
    blocks: dict[str, Trial] = field(default_factory=dict)  # by the block's name in the model
    left: dict[str, str] = field(default_factory=dict)  # blocks that stay as they are, and why
    loss: str = ""
    functions: list[str] = field(default_factory=list)  # norms that are calls in a forward, which stay as they are

    def undo(self) -> None:
        """Gives the model back its own norms, sums and loss; its parameters keep their values."""
        restore_norms(self.model, verbose=False)
        restore_loss(self.model, verbose=False)

    def __str__(self) -> str:
        along: dict[str, str] = {}
        for block, trial in self.blocks.items():
            for path, features in trial.norms.items():
                what = ", ".join(("the add before it", *features))
                along[f"{block}.{path}" if path else block] = f"with {what}"
        lines = [
            (site.name, site.was, (along.get(site.name, "fused") if site.fused else f"left alone: {site.why}"))
            for site in self.norms
        ]
        table = [f"{names}: {f'{count} × ' if count > 1 else ''}{was}, {what}" for names, was, what, count in _grouped(lines)]
        table += [
            f"{names}: {f'{count} × ' if count > 1 else ''}{kind}, sums left alone: {why}"
            for names, kind, why, count in _grouped(
                [(name, type(self.model.get_submodule(name)).__name__, why) for name, why in self.left.items()]
            )
        ]
        return "\n".join([*table, *filter(None, [self.loss]), *self.functions]) or "nothing in it is a norm"


def adopt(
    model: nn.Module,
    *,
    blocks: bool = True,
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
        loss: also replace `loss_function`, if it is that of transformers' causal language models.
        only: a function of each norm's and block's name and module; what it returns False for is left alone.
        verbose: print the table.

    Returns:
        What was done; `.undo()` undoes it, as does `restore_norms(model)`.

    Raises:
        TypeError: model is no module, or only no function.
    """
    found = Adoption(model, replace_norms(model, only=only, verbose=False))
    if blocks:
        _adopt_blocks(model, found, only)
    if loss and callable(getattr(model, "loss_function", None)):
        try:
            found.loss = replace_loss(model, verbose=False)
        except ValueError as error:
            found.loss = str(error).removeprefix("replace_loss: ")
    found.functions = _functional_norms(model)
    if verbose:
        print(found)
    return found


def _functional_norms(model: nn.Module) -> list[str]:
    """A line for each class whose forward, or a function that it calls by name, calls F.rms_norm or F.layer_norm."""
    lines: dict[str, None] = {}
    for module in model.modules():
        cls = type(module)
        if isinstance(module, AdoptedNorm | nn.LayerNorm | nn.RMSNorm) or cls.__module__.startswith("torch."):
            continue
        code: Any = getattr(cls.forward, "__code__", None)
        called = [cls.forward.__globals__.get(name) for name in code.co_names] if code else []
        for function in (cls.forward, *called):
            code = getattr(function, "__code__", None)
            for name in {"rms_norm", "layer_norm"} & set(code.co_names if code else ()):
                where = "" if function is cls.forward else f" by {code.co_name}()"
                line = (
                    f"{cls.__name__}.forward calls F.{name}{where}, which is no module: call {name}_fn in its place, or use a"
                )
                lines[f"{line} norm module"] = None
    return list(lines)


def _adopt_blocks(model: nn.Module, found: Adoption, only: Callable[[str, nn.Module], bool] | None) -> None:
    seen: set[nn.Module] = set()
    stacks = [(name, module) for name, module in model.named_modules() if is_stack(module)]
    for stack, container in reversed(stacks):  # the inner ones first
        for child, block in container._modules.items():
            name = f"{stack}.{child}" if stack else child
            if block is None or block in seen or isinstance(block, AdoptedNorm):
                continue
            seen.add(block)
            parts = list(block.modules())
            if is_stack(block) or not any(isinstance(part, AdoptedNorm) for part in parts) or any(map(is_fused, parts)):
                continue
            if only is not None and not only(name, block):
                continue
            trial = try_block(block)
            if isinstance(trial, str):
                found.left[name] = trial
                continue
            fuse(block, trial)
            found.blocks[name] = trial
    for name in _ancestors(found.blocks):
        module = model.get_submodule(name)
        if not has_hook(module, SettleOutput):
            module.register_forward_hook(SettleOutput(), prepend=True)


def _ancestors(names: dict[str, Trial]) -> set[str]:
    """The names of all modules that contain these blocks, blocks excepted."""
    found = set()
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            found.add(name)
    return {name for name in found if name not in names}


def _grouped(lines: list[tuple[str, str, str]]) -> list[tuple[str, str, str, int]]:
    """Lines that differ in numbers of their name alone, as one: layers.{0…31}.norm."""
    groups: dict[tuple[str, str, str], list[list[str]]] = {}
    for name, was, what in lines:
        groups.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "#", name), was, what), []).append(
            re.findall(r"(?<![^.])\d+(?![^.])", name)
        )
    found = []
    for (pattern, was, what), numbers in groups.items():
        for column in zip(*numbers, strict=True):
            pattern = pattern.replace("#", _range(sorted(set(map(int, column)))), 1)
        found.append((pattern, was, what, len(numbers)))
    return found


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2:
        return f"{{{numbers[0]}…{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"
