"""What a block hands to its parts, found by running its own forward with stand-ins for them.

`blocks` replaces that forward, so whatever else it does must be known, or the block is refused.
"""

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .norms import Swapped

_SHAPES = ((2, 3, 8), (1, 5, 8))  # two, so that what depends on the shape does not look like a constant
_INPUT = object()  # stands for the mixer's input among its other arguments
_OUTLIER = 1e5  # shows whether the stream or a branch is clamped
BY_HAND = f"rewrite such a block by hand, after the listing at the head of {__package__.replace('.', '/')}/blocks.py"


@dataclass(frozen=True)
class BlockLayout:
    """What a block calls its parts: x + dropout1(mixer(norm1(x))), then x + dropout2(mlp(norm2(x)))."""

    norm1: str
    mixer: str  # attention, or what is in its place
    norm2: str
    mlp: str
    dropout1: str | None = None  # the nn.Dropout that mixer's output goes through last; dotted where it is inside
    dropout2: str | None = None  # and mlp's


@dataclass(frozen=True)
class Wiring:
    """The arguments of a block's forward, and where it hands them."""

    names: tuple[str, ...]  # that may be given by position, x first
    defaults: dict[str, Any]  # of those after x that need not be given
    handed_on: dict[str, str]  # from the block's name to the mixer's, of arguments that the mixer gets as they are
    hands_on_more: bool  # the mixer also gets every argument that the block has no name for
    always: dict[str, Any]  # what else the mixer gets where no argument says otherwise
    again: tuple[str, ...]  # the mixer's names for its input, given once more: to torch's attention as key and value

    def for_mixer(self, y: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """The mixer's arguments but for its input y, from the block's arguments but for x.

        Raises:
            TypeError: the mixer would not get one of them.
        """
        found = self.always | dict.fromkeys(self.again, y)
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
        if missing := [name for name in self.handed_on if name not in given and name not in self.defaults]:
            raise TypeError(f"fused block: forward misses {', '.join(missing)}")
        return found


def parts_of(name: str, block: nn.Module, layout: BlockLayout) -> dict[str, nn.Module]:
    """The block's parts by field of the layout. Raises ValueError if it lacks one, has others, or has a wrapped forward."""
    parts, paths = {}, {field: path for field, path in vars(layout).items() if path is not None}
    for field, path in paths.items():
        try:
            parts[field] = block.get_submodule(path)
        except AttributeError:
            children = ", ".join(child for child, _ in block.named_children()) or "none"
            todo = "Describe it with a BlockLayout of their names"
            raise ValueError(f"{name}: block has no {path!r}, layout.{field}; its parts are {children}. {todo}") from None
    for field, module in {"block": block, **parts}.items():
        if "forward" in module.__dict__ and field not in ("mixer", "mlp"):
            part = field if module is block else f"layout.{field}"
            raise ValueError(
                f"{name}: the forward of {part} is replaced on the instance, by a tool that wraps modules or by "
                "x.forward = torch.compile(x.forward); it would go on running. Fuse blocks before that"
            )
    known = {path.split(".")[0] for path in paths.values()}
    more = [child for child, module in block.named_children() if child not in known and type(module) is not nn.Identity]
    more += [parameter for parameter, _ in block.named_parameters(recurse=False)]
    if more:
        suggested = _with_dropouts(block, layout, more)
        todo = f"if that is what drops behind its mixer and its MLP, give {suggested}; else {BY_HAND}" if suggested else BY_HAND
        raise ValueError(f"{name}: block also has {', '.join(more)}, of which layout says nothing; {todo}")
    for field in ("dropout1", "dropout2"):
        if field in parts:
            _check_dropout(f"{name}: layout.{field}", parts[field], block, layout)
    return parts


def _check_dropout(name: str, dropout: nn.Module, block: nn.Module, layout: BlockLayout) -> None:
    if isinstance(dropout, Swapped):
        raise ValueError(
            f"{name} is one module with a dropout of another block, which is fused; whether it has yet more to do can't be "
            "seen from a block. Give each block, and the embeddings, an nn.Dropout of its own"
        )
    if type(dropout) is not nn.Dropout:
        raise ValueError(f"{name} is a {type(dropout).__name__}, expected an nn.Dropout")
    paths = [path for path, module in block.named_modules(remove_duplicate=False) if module is dropout]
    if elsewhere := ", ".join(path for path in paths if path not in (layout.dropout1, layout.dropout2)):
        todo = "which would not drop there any more; give each place an nn.Dropout of its own"
        raise ValueError(f"{name} is also {elsewhere}, one module, {todo}")


def _with_dropouts(block: nn.Module, layout: BlockLayout, more: list[str]) -> BlockLayout | None:
    """The layout with these parts of the block as the dropouts that it does not name; None if that can't be."""
    unnamed = [field for field in ("dropout1", "dropout2") if getattr(layout, field) is None]
    if len(more) > len(unnamed) or not all(type(getattr(block, part)) is nn.Dropout for part in more):
        return None
    return replace(layout, **dict(zip(unnamed, more * 2, strict=False)))  # one dropout may serve both


def wiring_of(name: str, block: nn.Module, layout: BlockLayout, parts: dict[str, nn.Module]) -> Wiring:
    """How the block's forward hands on its arguments. Raises ValueError if the block does more than BlockLayout describes."""
    own = list(inspect.signature(type(block).forward).parameters.values())[1:]
    named = [p for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    defaults = {p.name: p.default for p in named[1:] if p.default is not p.empty}
    needed = {p.name: object() for p in named[1:] if p.default is p.empty}

    given_to_mixer = partial(_given_to_mixer, name, block, layout, parts)
    trials = [given_to_mixer(needed, shape, training) for shape in _SHAPES for training in (False, True)]
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
            given = given_to_mixer(needed | {argument: probe}, _SHAPES[0], training=False)
        except ValueError:
            continue  # the block looks at it
        if got := [b for b, value in given.items() if value is probe]:
            handed_on[argument] = got[0]
    hands_on_more = handed_on.pop("any_other_name", None) is not None
    names = tuple(p.name for p in named if p.kind is not p.KEYWORD_ONLY)
    again = tuple(b for b, value in always.items() if value is _INPUT)
    always = {b: value for b, value in always.items() if value is not _INPUT}
    return Wiring(names, defaults, handed_on, hands_on_more, always, again)


def _given_to_mixer(name, block, layout, parts, arguments, shape, training) -> dict[str, Any]:
    """What the mixer gets beside its input when the block's own forward runs; raises unless it computes what it should."""
    stand_ins = {part: _StandIn(parts[part], 0.1 * (i + 1)) for i, part in enumerate(("norm1", "mixer", "norm2", "mlp"))}
    norm1, mixer, norm2, mlp = stand_ins.values()
    halves = [path for path in (layout.dropout1, layout.dropout2) if path and "." not in path]  # instead of dropping
    modules: dict[str, Any] = {getattr(layout, part): module for part, module in stand_ins.items()}
    modules |= dict.fromkeys(halves, lambda x: 0.5 * x)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    x[..., 0] *= _OUTLIER
    expected = x + (0.5 if layout.dropout1 in halves else 1.0) * mixer(norm1(x))
    expected = expected + (0.5 if layout.dropout2 in halves else 1.0) * mlp(norm2(expected))

    clone = object.__new__(type(block))
    clone.__dict__ |= block.__dict__ | {"_modules": {**block._modules, **modules}, "training": training}
    problem = ""
    for mixer.returns_tuple in (False, True):  # transformers' attention also returns its weights
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
                found = type(block).forward(clone, x, **arguments)
        except Exception as error:  # the block's code may raise anything
            problem = problem or f"trying it with stand-ins for its parts raised {type(error).__name__}: {error}"
            continue
        if not isinstance(found, Tensor):
            problem = f"it returns a {type(found).__name__}, expected a tensor"
        elif found.shape != x.shape or not torch.allclose(found, expected, atol=1e-5):
            mode = " in training" if training else ""
            problem = f"it does not compute x + mixer(norm1(x)), then x + mlp(norm2(x)){mode}, of stand-ins for its parts"
        elif more := [*norm1.given, *norm2.given, *mlp.given]:
            problem = f"its norms or its MLP get {', '.join(more)} beside their input"
        else:
            return mixer.given
    raise ValueError(f"{name}: {problem}. See whether each name in {layout} is in its place; if so, {BY_HAND}")


class _StandIn(nn.Module):
    """sin(x + phase) in place of a part, with one feature that stands out."""

    def __init__(self, part: nn.Module, phase: float) -> None:
        super().__init__()
        parameters = inspect.signature(part.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)] or ["x"]
        self.phase, self.returns_tuple = phase, False
        self.given: dict[str, Any] = {}  # beside x, by the part's own names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(self.names):
            raise TypeError(f"{len(args)} arguments for a part that names {len(self.names)}")
        self.given = dict(zip(self.names, args, strict=False)) | kwargs
        x = self.given.pop(self.names[0])
        self.given = {name: _INPUT if value is x else value for name, value in self.given.items()}
        y = torch.sin(x + self.phase)
        y[..., 1] *= _OUTLIER
        return (y, None) if self.returns_tuple else y


def _same(a: Any, b: Any) -> bool:
    """Equal numbers or strings of one type; anything else is the same as itself alone."""
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)
