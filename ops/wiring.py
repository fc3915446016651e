"""How a block hands things to its parts, found by running its own forward with stand-ins for them.

`prenorm_block` replaces that forward, so whatever it does besides must be known, or refused.
"""

import inspect
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .swap import Swapped

_SHAPES = ((2, 3, 8), (1, 5, 8))  # tried twice: what follows from a shape or from the mode is no constant
_FOLDER = __package__.replace(".", "/")  # ops, prenorm, or what somebody's copy is called
_OUTLIER = 1e5  # what clamps the stream or a branch would clamp it
BY_HAND = f"rewrite such a block by hand, after the listing at the head of {_FOLDER}/prenorm_block.py"


@dataclass(frozen=True)
class BlockLayout:
    """What a block calls its parts: x + dropout1(mixer(norm1(x))), then x + dropout2(mlp(norm2(x)))."""

    norm1: str
    mixer: str  # attention, or what is in its place
    norm2: str
    mlp: str
    dropout1: str | None = None  # the nn.Dropout that mixer's output goes through last; dotted where it is inside
    dropout2: str | None = None  # and mlp's


class Again(Enum):
    """What the mixer gets once more, as torch's attention its query as key and value. Copies and pickles as itself."""

    INPUT = "the mixer's input"


@dataclass(frozen=True)
class Wiring:
    """The arguments of a block's forward, and what becomes of them."""

    names: tuple[str, ...]  # that may be given by position, x first
    defaults: dict[str, Any]  # of those after x that need not be given
    handed_on: dict[str, str]  # by the block's name, the mixer's name for what it gets as it is
    hands_on_more: bool  # the same for every name that the block does not have
    always: dict[str, Any]  # what the mixer gets beside, and where an argument is left out

    def for_mixer(self, y: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """The mixer's arguments behind its input.

        Args:
            y: that input.
            given: the block's arguments behind x.

        Raises:
            TypeError: one is missing, or the block did something else with it than hand it on.
        """
        found = {name: y if value is Again.INPUT else value for name, value in self.always.items()}
        for name, value in given.items():
            if name in self.handed_on:
                found[self.handed_on[name]] = value
            elif self.hands_on_more and name not in self.defaults:
                found[name] = value
            elif name not in self.defaults or not _same(value, self.defaults[name]):
                raise TypeError(
                    f"fused block: argument {name} is a {type(value).__name__}; the block's own forward did not just hand it "
                    "to its mixer, and a fused block can do no more than that. Leave it out, or restore_norms"
                )
        missing = [name for name in self.handed_on if name not in given and name not in self.defaults]
        if missing:
            raise TypeError(f"fused block: forward misses {', '.join(missing)}")
        return found


def parts_of(name: str, block: nn.Module, layout: BlockLayout) -> dict[str, nn.Module]:
    """The block's parts by field of the layout.

    Raises:
        ValueError: it lacks one, or has others, or a forward that is not its class's.
    """
    parts = {}
    for field in fields(layout):
        path = getattr(layout, field.name)
        if path is None:
            continue
        try:
            parts[field.name] = block.get_submodule(path)
        except AttributeError:
            children = ", ".join(child for child, _ in block.named_children())
            raise ValueError(
                f"{name}: block has no {path!r}, layout.{field.name}; its parts are {children or 'none'}. Describe it with a "
                "BlockLayout of their names"
            ) from None
    for part, module in {"block": block, **{f"layout.{argument}": part for argument, part in parts.items()}}.items():
        if "forward" in module.__dict__ and part not in ("layout.mixer", "layout.mlp"):
            raise ValueError(
                f"{name}: the forward of {part} is replaced on the instance, by a tool that wraps modules or by "
                "x.forward = torch.compile(x.forward); it would go on running. Fuse blocks before that"
            )
    known = {str(path).split(".")[0] for path in vars(layout).values() if path}
    more = [child for child, module in block.named_children() if child not in known and type(module) is not nn.Identity]
    more += [parameter for parameter, _ in block.named_parameters(recurse=False)]
    if more:
        todo = BY_HAND
        if suggested := _with_dropouts(block, layout, more):
            todo = f"if that is what drops behind its mixer and its MLP, give {suggested}; else {BY_HAND}"
        raise ValueError(f"{name}: block also has {', '.join(more)}, of which layout says nothing; {todo}")
    for argument in ("dropout1", "dropout2"):
        if argument not in parts:
            continue
        if isinstance(parts[argument], Swapped):
            raise ValueError(
                f"{name}: layout.{argument} is one module with a dropout of another block, which is fused; whether it has yet "
                "more to do can't be seen from a block. Give each block, and the embeddings, an nn.Dropout of its own"
            )
        if type(parts[argument]) is not nn.Dropout:
            raise ValueError(f"{name}: layout.{argument} is a {type(parts[argument]).__name__}, expected an nn.Dropout")
        paths = [path for path, module in block.named_modules(remove_duplicate=False) if module is parts[argument]]
        if elsewhere := ", ".join(path for path in paths if path not in (layout.dropout1, layout.dropout2)):
            raise ValueError(
                f"{name}: layout.{argument} is also {elsewhere}, one module, which would not drop there any more; give each "
                "place an nn.Dropout of its own"
            )
    return parts


def wiring_of(name: str, block: nn.Module, layout: BlockLayout, parts: dict[str, nn.Module]) -> Wiring:
    """
    Raises:
        ValueError: the block is not the one that BlockLayout describes, or computes what it gives to its mixer.
    """
    own = list(inspect.signature(type(block).forward).parameters.values())[1:]
    named = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    defaults = {p.name: p.default for p in named[1:] if p.default is not p.empty}
    needed = {p.name: object() for p in named[1:] if p.default is p.empty}

    trials = [_given_to_mixer(name, block, layout, parts, shape, mode, needed) for shape in _SHAPES for mode in (False, True)]
    always = trials[0]
    handed_on = {a: b for a, value in needed.items() for b, given in always.items() if given is value}
    if used := ", ".join(argument for argument in needed if argument not in handed_on):
        raise ValueError(f"{name}: block does something else with its argument {used} than hand it to its mixer; {BY_HAND}")
    always = {b: value for b, value in always.items() if b not in handed_on.values()}
    for b, value in always.items():
        if not all(b in trial and _same(trial[b], value) for trial in trials):
            raise ValueError(f"{name}: block computes {b}, which it gives to its mixer; {BY_HAND}")

    for argument in [*defaults, "any_other_name"]:
        probe = object()
        try:
            given = _given_to_mixer(name, block, layout, parts, _SHAPES[0], False, needed | {argument: probe})
        except ValueError:
            continue  # the block looks at it
        if got := [b for b, value in given.items() if value is probe]:
            handed_on[argument] = got[0]
    hands_on_more = handed_on.pop("any_other_name", None) is not None
    names = tuple(p.name for p in named if p.kind is not p.KEYWORD_ONLY)
    return Wiring(names, defaults, handed_on, hands_on_more, always)


def check_drops_last(name: str, argument: str, sublayer: nn.Module, dropout: nn.Module, width: int) -> None:
    """Whether what the dropout inside a sublayer puts out is what the sublayer puts out.

    Raises:
        ValueError: it is not. A sublayer that can't do with None for what it needs beside x, a mask for instance, can't be
            tried, and is taken at the layout's word.
    """
    marks: list[Tensor] = []
    buffers = [(buffer, buffer.clone()) for buffer in sublayer.buffers()]  # running statistics, a cache

    def mark(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        marks.append(torch.randn_like(output))
        return marks[-1]

    weight = next(sublayer.parameters(), torch.empty(0))
    handle = dropout.register_forward_hook(mark)
    cuda = [weight.device] if weight.device.type == "cuda" else []
    try:
        more = list(inspect.signature(type(sublayer).forward).parameters.values())[2:]
        needed = {p.name: None for p in more if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        with torch.no_grad(), torch.random.fork_rng(devices=cuda), torch.compiler.set_stance("force_eager"):
            x = torch.randn(1, 2, width, dtype=weight.dtype, device=weight.device)
            y = type(sublayer).forward(sublayer, x, **needed)
            if needed and not marks:
                return  # None has led it elsewhere
            y = y[0] if isinstance(y, tuple) else y
            last = len(marks) == 1 and torch.equal(y.flatten(), marks[0].flatten())
    except Exception:  # whatever their code raises where it is called without what it needs
        return
    finally:
        handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    if not last:
        raise ValueError(f"{name}: layout.{argument} is not the last that happens in its sublayer, so no norm can do its work")


def _with_dropouts(block: nn.Module, layout: BlockLayout, more: list[str]) -> BlockLayout | None:
    """The layout with these parts of the block as the dropouts that it does not name; None if that can't be."""
    unnamed = [argument for argument in ("dropout1", "dropout2") if getattr(layout, argument) is None]
    if len(more) > len(unnamed) or not all(type(getattr(block, part)) is nn.Dropout for part in more):
        return None
    parts = more if len(more) == len(unnamed) else more * 2
    return replace(layout, **dict(zip(unnamed, parts, strict=True)))


def _given_to_mixer(
    name: str,
    block: nn.Module,
    layout: BlockLayout,
    parts: dict[str, nn.Module],
    shape: tuple[int, ...],
    training: bool,
    arguments: dict[str, Any],
) -> dict[str, Any]:
    """Runs the block's own forward, sees that it computes what it should, and returns what its mixer got beside its input."""
    stand_ins = {part: _StandIn(parts[part], 0.1 * (i + 1)) for i, part in enumerate(("norm1", "mixer", "norm2", "mlp"))}
    norm1, mixer, norm2, mlp = stand_ins.values()
    halves = {part: path for part in ("dropout1", "dropout2") if (path := getattr(layout, part)) and "." not in path}
    modules: dict[str, nn.Module] = {getattr(layout, part): module for part, module in stand_ins.items()}
    modules |= {path: _Half() for path in halves.values()}
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    x[..., 0] *= _OUTLIER
    expected = x + (0.5 if "dropout1" in halves else 1.0) * mixer(norm1(x))
    expected = expected + (0.5 if "dropout2" in halves else 1.0) * mlp(norm2(expected))

    clone = object.__new__(type(block))
    clone.__dict__.update(block.__dict__)
    clone.__dict__ |= {"_modules": {**block._modules, **modules}, "training": training}
    problem = ""
    for mixer.returns_tuple in (False, True):  # transformers' attention also returns its weights
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
                found = type(block).forward(clone, x, **arguments)
        except Exception as error:  # whatever their code raises
            problem = problem or f"trying it with stand-ins for its parts raised {type(error).__name__}: {error}"
            continue
        mode = " in training" if training else ""
        if not isinstance(found, Tensor):
            problem = f"it returns a {type(found).__name__}, expected a tensor"
        elif found.shape != x.shape or not torch.allclose(found, expected, atol=1e-5):
            problem = f"it does not compute x + mixer(norm1(x)), then x + mlp(norm2(x)){mode}, of stand-ins for its parts"
        elif more := [*norm1.given, *norm2.given, *mlp.given]:
            problem = f"its norms or its MLP get {', '.join(more)} beside their input"
        else:
            return mixer.given
    raise ValueError(f"{name}: {problem}. See whether each name in {layout} is in its place; if so, {BY_HAND}")


def _same(a: Any, b: Any) -> bool:
    """For what can be a constant; anything else is the same as itself alone."""
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


class _StandIn(nn.Module):
    """sin(x + phase) in the place of a part, with one feature that stands out."""

    def __init__(self, part: nn.Module, phase: float) -> None:
        super().__init__()
        parameters = inspect.signature(part.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)] or ["x"]
        self.phase, self.returns_tuple = phase, False
        self.given: dict[str, Any] = {}  # beside x, by the names that the part has for it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(self.names):
            raise TypeError(f"{len(args)} arguments for a part that names {len(self.names)}")
        self.given = dict(zip(self.names, args, strict=False)) | kwargs
        x = self.given.pop(self.names[0])
        self.given = {name: Again.INPUT if value is x else value for name, value in self.given.items()}
        y = torch.sin(x + self.phase)
        y[..., 1] *= _OUTLIER
        return (y, None) if self.returns_tuple else y


class _Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x
