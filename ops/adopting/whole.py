"""A whole model in one call.

adopt(model)                model.layers.{0…31}.input_layernorm: 32 × LlamaRMSNorm(4096), with the stream past it
adopt(model).undo()
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .adopted import Adopted, Only, restore
from .blocks import AdoptedBlock, fuse
from .gated import AdoptedGatedNorm
from .loss import calls_loss, replace_loss, restore_loss
from .mlp import replace_mlps
from .norms import AdoptedNorm, Site, replace_norms
from .results import difference, floats_in, gradients
from .rotary import replace_rotary
from .trial import Trial, try_block

_LEAST = 1e-3  # of the largest gradient: softmax does not see keys' biases, so theirs is rounding alone


@dataclass(repr=False)
class Adoption:
    """What `adopt` did; str is the table that it prints."""

    model: nn.Module
    norms: list[Site] = field(default_factory=list)
    blocks: dict[str, Trial] = field(default_factory=dict)  # by the block's name in the model
    left: dict[str, str] = field(default_factory=dict)  # blocks that stay as they are, and why
    rotary: list[tuple[str, str]] = field(default_factory=list)  # names of attention modules, and what was done there
    mlps: list[tuple[str, str]] = field(default_factory=list)
    loss: str = ""
    notes: list[str] = field(default_factory=list)  # what else a reader should know

    def undo(self) -> None:
        """Gives the model back its own norms, sums, rotary positions, MLPs and loss; its parameters keep their values."""
        restore("undo", self.model, Adopted)
        restore_loss(self.model, verbose=False)

    def __str__(self) -> str:
        along = {}
        for block, trial in self.blocks.items():
            for path, features in trial.norms.items():
                sums = "the stream past it" if path == trial.enters else "the add before it"
                along[f"{block}.{path}".strip(".")] = f"with {', '.join((sums, *features))}"
            along |= {f"{block}.{path}".strip("."): "with scale and shift" for path in trial.modulated}
        lines = [
            (site.name, f"{site.was}, {along.get(site.name, 'fused' if site.fused else f'left alone: {site.why}')}")
            for site in self.norms
        ]
        for name, why in self.left.items():
            lines.append((name, f"{type(self.model.get_submodule(name)).__name__}, sums left alone: {why}"))
        told = [*_grouped(lines + self.rotary + self.mlps), *filter(None, [self.loss]), *self.notes]
        return "\n".join(told) or "nothing in it is a norm"


def adopt(
    model: nn.Module,
    batch: Any = None,
    *,
    blocks: bool = True,
    rotary: bool = True,
    mlp: bool = True,
    loss: bool = True,
    only: Only = None,
    verbose: bool = True,
) -> Adoption:
    """Lets a model run the fused kernels, in place: its norms, residual sums, rotary positions,
    gated MLPs, and its loss.

    Norms are replaced as `replace_norms` says. Then the blocks in the model are looked for, and each is tried: where a norm can
    compute a residual sum along, it does, with the dropout, scale, drop path or norm that the branch goes through. The block
    keeps its own forward, so its arguments, caches and whatever else it does stay as they are. What enters and leaves a module
    is a tensor. A second call changes nothing. If anything raises, the model is as it was.

    Args:
        model: any module; on any device, on meta too. Before DDP, FSDP or torch.compile are put around it.
        batch: what the model is called with: a dict (keyword arguments), a tuple or a tensor, on its device. The model is then
            run before and after, in evaluation, and if outputs or gradients differ by more than 1e-3 (fp32; 0.05 in bf16
            and fp16) of their norm, all is undone. A gradient counts as at least a thousandth of the largest.
        blocks: also compute the sums of its blocks in the norms.
        rotary: also turn queries and keys in one kernel, with the norms before (`replace_rotary`).
        mlp: also compute the activation and product of gated MLPs in one kernel (`replace_mlps`).
        loss: also replace `loss_function`, if its forward calls one that is that of transformers' causal language models.
        only: a function of the name and module of each norm, block, attention and MLP; what it returns False for is left alone.
        verbose: print the table.

    Returns:
        What was done; `.undo()` undoes it.

    Raises:
        TypeError: model is no module, or `only` no function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"adopt: model is a {type(model).__name__}, expected a module; put blocks into an nn.ModuleList")
    if only is not None and not callable(only):
        raise TypeError(f"adopt: only is {only!r}, expected a function of name and module: only=lambda name, module: …")
    model = model._modules.get("_orig_mod") or model  # what torch.compile was given has the loss
    wanted = None if batch is None else _results(model, batch)
    undo = _undoing(model)
    found = Adoption(model)
    try:
        found.norms = replace_norms(model, only=only, verbose=False)
        if blocks:
            _fuse_blocks(found, only)
        if rotary:
            found.rotary = replace_rotary(model, only=only)
        if mlp:
            found.mlps = replace_mlps(model, only=only)
        if loss and calls_loss(model):
            try:
                found.loss = replace_loss(model, verbose=False)
            except ValueError as error:
                found.loss = str(error).removeprefix("replace_loss: ")
        if blocks and not found.blocks and not found.left and any(site.fused for site in found.norms):
            found.notes.append("no block found: no module's forward takes the stream first and adds to what its norms get")
        found.notes += _functional_norms(model)
        differs = "" if wanted is None else difference(wanted, _results(model, batch), least=_LEAST)
    except BaseException:
        undo()
        raise
    if differs:
        undo()
        found = Adoption(model, notes=[f"all undone: {differs}"])
    if verbose:
        print(found)
    return found


def fuse_prenorm_block(block: nn.Module, *, residual_in_fp32: bool = False) -> Trial | list[Trial]:
    """Lets the norms of a block, or of each of a stack, compute its residual sums, in place. `restore_norms(model)` undoes it.

    The norms inside are replaced too. `adopt` finds the blocks of a model by itself; this is for one stack, or to insist.

    Args:
        block: any block whose forward takes the stream first. Or an nn.ModuleList or nn.Sequential of such blocks: all are
            fused, or none.
        residual_in_fp32: keep the stream in fp32: a block that gets it in another dtype converts it.

    Returns:
        What was found, of each block of a stack.

    Raises:
        ValueError: nothing in the block can be fused. It stays as it was.
    """
    stack = _is_stack(block)
    blocks = [one for one in dict.fromkeys(block.children()) if type(one) is not nn.Identity] if stack else [block]
    if not blocks:
        raise ValueError(f"fuse_prenorm_block: {type(block).__name__} has no blocks")
    undo = _undoing(block)
    replace_norms(block, verbose=False)
    trials: list[Any] = ["it is fused already; restore_norms undoes it" if _is_fused(one) else try_block(one) for one in blocks]
    if refused := [i for i, trial in enumerate(trials) if isinstance(trial, str)]:
        undo()
        i = refused[0]
        which = f"It is block {i} of {len(blocks)}, and all stay as they were"
        raise ValueError(f"fuse_prenorm_block({type(blocks[i]).__name__}): {trials[i]}. {which}")
    for one, trial in zip(blocks, trials, strict=True):
        fuse(one, trial, residual_in_fp32)
    return trials if stack else trials[0]


def _undoing(model: nn.Module) -> Callable[[], None]:
    """A function that gives every module the class, attributes and hooks back that it has now."""
    kept = [
        (m, type(m), dict(vars(m)), {name: dict(hooks) for name, hooks in vars(m).items() if name.startswith("_forward_")})
        for m in model.modules()
    ]

    def undo() -> None:
        for module, own, attributes, hooks in kept:
            module.__class__ = own
            vars(module).clear()
            vars(module).update(attributes)
            for name, before in hooks.items():
                vars(module)[name].clear()
                vars(module)[name].update(before)

    return undo


def _fuse_blocks(found: Adoption, only: Only) -> None:
    fused = [block for block in found.model.modules() if isinstance(block, AdoptedBlock)]
    tried, found_of = {part for block in fused for part in block.modules()}, dict[type, Any]()
    for name, block, is_stacked in _blocks(found.model):
        parts = list(block.modules())
        if not any(isinstance(part, AdoptedNorm) for part in parts) or _is_fused(block):
            continue
        if block in tried or (only and not only(name, block)):
            continue
        trial = found_of[type(block)] = try_block(block, found_of.get(type(block)))
        tried.update([block] if isinstance(trial, str) else parts)
        if not isinstance(trial, str):
            fuse(block, trial)
            found.blocks[name] = trial
        elif is_stacked:
            found.left[name] = trial
    for name in [name for name in found.left if any(fused.startswith(f"{name}.") for fused in found.blocks)]:
        del found.left[name]  # a part of it is fused


def _is_fused(module: nn.Module) -> bool:
    """Whether it is a fused block, or has one in it."""
    return any(isinstance(part, AdoptedBlock) for part in module.modules())


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules in containers, of the inner containers first; then all others, what they hold first. With whether it is in a
    container."""
    modules = [(name, m) for name, m in reversed([*model.named_modules()]) if not isinstance(m, AdoptedNorm)]
    for stack, container in modules:
        for child, block in container.named_children() if _is_stack(container) else ():
            if not _is_stack(block) and not isinstance(block, AdoptedNorm):
                yield f"{stack}.{child}" if stack else child, block, True
    yield from [(name, m, False) for name, m in modules if not _is_stack(m)]


def _is_stack(module: nn.Module) -> bool:
    """Whether it is a container of modules: one without a forward of its own."""
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _results(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Outputs, and gradients of a loss: the model's own, or a projection of its outputs."""
    modes = {module: module.training for module in model.modules()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            torch.default_generator.manual_seed(0)
            for device in devices:
                torch.cuda.default_generators[device.index].manual_seed(0)
            model.eval()
            args = batch if isinstance(batch, tuple) else () if isinstance(batch, Mapping) else (batch,)
            found = floats_in(model(*args, **(batch if isinstance(batch, Mapping) else {})), "output")
            losses = {name: y for name, y in found.items() if y.requires_grad and y.dim() == 0}
            found |= gradients(dict([*losses.items()][:1]) or found, parameters)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {name: t.detach().clone() for name, t in found.items()}


def _functional_norms(model: nn.Module) -> list[str]:
    """A line for each class whose forward, or what it calls of its own file, calls F.rms_norm or F.layer_norm."""
    lines: dict[str, None] = {}
    norms = AdoptedNorm, AdoptedGatedNorm, nn.LayerNorm, nn.RMSNorm
    for cls, module in {type(module): module for module in model.modules()}.items():
        if isinstance(module, norms) or cls.__module__.startswith("torch."):
            continue
        called: list[Any] = [inspect.unwrap(cls.forward)]
        for function in called:  # which grows
            names = _names(function.__code__) if isinstance(function, FunctionType) else set()
            found = [function.__globals__.get(name, getattr(cls, name, None)) for name in sorted(names)]
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
