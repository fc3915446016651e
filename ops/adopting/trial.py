"""Which sums of a block a kernel can compute together with what is around them: its own forward is run with stand-ins for its
sublayers.

The trial runs clones on the CPU, with random weights. First it learns what the block adds up and which norms it calls on sums:
one part after the other becomes a `Source`. Then it fuses a clone in this way and compares it with one that is as it was:
outputs and gradients, in evaluation and in training, with autocast on and off, and with the block under reentrant
checkpointing. The block itself is not run and not changed; its weights may be anywhere, on meta too.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from ..checks import KERNEL_DTYPES
from . import lazy
from .adopted import LeftAlone, raised
from .blocks import fuse
from .lazy import Lazy, Role, has_rows_of
from .norms import AdoptedNorm
from .recognise import undisturbed
from .results import difference, floats_in, upstream
from .stand_ins import Returns, SameDropout, StandIn, clone_of

_FEATURES = {
    "branch_norm": "norm of the branch", "branch_weight": "layer scale", "scale": "scale", "rowscale": "drop path",
    "dropout_p": "dropout", "gate": "gate",
}  # fmt: skip
_TOKENS = 16
_TRIES = 12  # of a block, each of which learns one more thing about what the stand-ins return


@dataclass
class Trial:
    """What was found of a block."""

    width: int
    argument: str  # the name of its stream
    enters: str = ""  # path of the norm that gets the stream as it comes
    roles: list[Role] = field(default_factory=list)  # of the parts whose outputs go into sums
    norms: dict[str, tuple[str, ...]] = field(default_factory=dict)  # path of a norm → what its kernel does along
    sums: list[tuple[str, ...]] = field(default_factory=list)  # what the kernels of sums do that compute no norm
    modulated: tuple[str, ...] = ()  # paths of the norms whose kernels do the scale and shift of each sample along
    follows: bool = True  # see `lazy.Role`
    gain: int = 0  # the more kernels do, the higher
    how: tuple = ()  # the parts that ran as they are, the shape of x and the other arguments
    tried: tuple[Role, ...] = ()  # of the parts whose outputs were seen in sums


def try_block(block: nn.Module, like: Trial | str | None = None) -> Trial | str:
    """What can be fused in a block whose norms are replaced; or in words why nothing can.

    like: what was found of another block of its class. If it does for this block too, no more is looked for; where nothing was
        found, it is not looked for what the block needs beside its stream.
    """
    norms = [m for m in block.modules() if isinstance(m, AdoptedNorm)]
    if not norms:
        return "it has no replaced norm"
    if "forward" in block.__dict__:
        return "its forward is replaced on the instance, by a tool that wraps modules; adopt it before that"
    widths = {m.formula.width for m in norms if m.formula.width is not None}
    of_matrices = Counter(m.in_features for m in block.modules() if isinstance(m, nn.Linear))
    if any(m.formula.width is None for m in norms):  # without weights it takes any width, so a matrix has to tell
        widths |= of_matrices.keys()
    if not widths:
        return "it has no matrix that tells the width of its stream"
    tried, reasons = list[Trial](), list[str]()
    with undisturbed(torch.device("cpu")):
        if isinstance(like, Trial) and like.width in widths:
            with suppress(Exception):  # anybody's code
                return _Bench(block, like).trial(like)
        for width in sorted(widths, key=lambda width: (of_matrices[width], width), reverse=True):
            inside = frozenset(_with_norms(block, width))
            conditioned = not (isinstance(like, str) or any(trial.gain for trial in tried))
            found = _try(block, width, inside, conditioned=conditioned)
            if isinstance(found, str):  # as attention that norms its queries, and needs what the model gives it
                reasons.append(found)
                inside = frozenset[str]()
                found = _try(block, width, inside, conditioned=conditioned)
            if isinstance(found, str):
                continue
            grows = True
            while grows:  # the forward of a part may add to the stream that it gets, or drop last
                grows = False
                for part in _composite(block, inside):
                    more = _try(block, width, inside | {part}, found)
                    if isinstance(more, Trial) and more.gain > found.gain:
                        inside, found, grows = inside | {part}, more, True
            tried.append(found)
    best = max(tried, key=lambda trial: trial.gain, default=None)
    if best is None:
        return reasons[0]
    return best if best.gain else "none of its replaced norms follows a sum, or is followed by one"


def _with_norms(block: nn.Module, width: int) -> list[str]:
    """Paths of the parts in which the stream is normed."""
    norms = {m for m in block.modules() if isinstance(m, AdoptedNorm) and m.formula.width in (None, width)}
    return [path for path, part in block.named_modules(remove_duplicate=False) if not norms.isdisjoint(part.modules())]


def _composite(block: nn.Module, inside: frozenset[str]) -> list[str]:
    """Paths of the stand-ins that stand for parts with parts."""
    paths = [path for path, part in block.named_modules() if path and next(part.children(), None) is not None]
    stand_ins = [path for path in paths if path not in inside and not _runs(block.get_submodule(path))]
    return [path for path in stand_ins if not any(path.startswith(f"{other}.") for other in stand_ins)]


def _try(
    block: nn.Module, width: int, inside: frozenset[str], like: Trial | None = None, conditioned: bool = True
) -> Trial | str:
    """like: a trial of this block that ran; conditioned: whether to look for what the block needs beside its stream."""
    _, *parameters = inspect.signature(type(block).forward).parameters.values()
    if not parameters or parameters[0].kind is parameters[0].VAR_KEYWORD:
        return "its forward takes no x"
    x, *others = parameters
    others = [p for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in others if p.default is p.empty]
    shapes, grids = ((2, _TOKENS, width), (2, 4, 4, width)), (None, (4, 4)) if needed else (None,)
    hows = [(inside, shape, dict.fromkeys(needed, grid)) for shape, grid in product(shapes, grids)]
    if like is not None:
        hows, conditioned = [(inside, *like.how[1:])], False
    reasons = list[str]()
    for how in hows:
        try:
            return _Bench(block, Trial(width, x.name, how=how)).trial()
        except LeftAlone as why:
            reasons.insert(0, str(why))
            conditioned = False
        except Exception as error:  # anybody's code
            reasons.append(_in_words(error, needed))
        if how is hows[-1] and conditioned:
            conditioned, nothing = False, {p.name: None for p in others if p.default is None or p.name in needed}
            hows += _conditioned(block, Trial(width, x.name, how=(inside, shapes[0], nothing)))
    return reasons[0]


def _conditioned(block: nn.Module, trial: Trial) -> list[tuple]:
    """How the block runs with arguments beside its stream, learnt one by one from how far it comes; empty if it does not."""
    inside, shape, given = trial.how
    batch, width = shape[0], shape[-1]
    # Five tokens go with no other number, so text is not taken for a condition, nor a condition for text.
    sizes = [(batch, 5, width), (batch, width), shape, (batch, 12, width)]
    sizes += [size for n in (6, 3) for size in ((batch, n, width), (batch, n * width), (batch, 1, n * width))]
    kinds = (None, *map(torch.Size, sizes), 4)
    furthest = tuple[int, ...]()
    while True:
        before = furthest
        for name, kind in (*product(given, kinds), ("", 4)):  # at last a number for all that is left, as height and width
            more = {name: kind} if name else dict.fromkeys([name for name, kind in given.items() if kind is None], kind)
            how = inside, shape, given | more
            bench = _Bench(block, replace(trial, how=how))
            try:
                bench.learn_calls()
                return [how]
            except Exception as error:  # anybody's code
                come = len(bench.calls), *_lines(error)
            if come > furthest:
                furthest, given = come, how[-1]
        if furthest == before:
            return []


def _lines(error: Exception) -> Iterator[int]:
    """The numbers of the lines in which the functions were that it came through."""
    frame = error.__traceback__
    while frame is not None:
        yield frame.tb_lineno
        frame = frame.tb_next


def _in_words(error: Exception, needed: list[str]) -> str:
    if needed:
        return f"it needs {', '.join(needed)} beside its stream, as a conditioned block does; trying it without {raised(error)}"
    if re.search(r"permute|not enough values to unpack|dimension|size of tensor", str(error)):
        return f"its stream is no (batch, tokens, width), as that of images is not; trying it with one {raised(error)}"
    return f"trying it with stand-ins for its sublayers {raised(error)}"


def _runs(module: nn.Module) -> bool:
    """Whether a part runs as it is in any case: norms, scales, what has no weights, and containers."""
    if isinstance(module, AdoptedNorm | nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return True
    return all(not is_lazy(p) and p.dim() < 2 for p in module.parameters()) and next(module.buffers(), None) is None


def _ways(module: nn.Module) -> list[tuple[bool, bool]]:
    """How a part may be a source: whether it takes a Lazy, and whether it is then computed when it has got its gate."""
    may_take = next(module.children(), None) is None and _runs(module)
    return [(True, False)] * may_take + [(True, True)] * isinstance(module, AdoptedNorm) + [(False, False)]


@dataclass
class _Sum:
    role: Role
    of: Lazy
    r: Tensor
    version: int
    norm: str = ""  # path of the first norm that is called on r
    viewed: bool = False  # on a view of it
    with_waiting: tuple[str, ...] = ()  # paths of other parts whose outputs it adds


class _Bench:
    """Clones of a block, that run as a trial of it says how."""

    def __init__(self, block: nn.Module, trial: Trial) -> None:
        self.block, self.empty = block, Trial(trial.width, trial.argument, how=trial.how)
        self.inside, shape, given = trial.how
        self.dtype = next((p.dtype for p in block.parameters() if p.dtype in KERNEL_DTYPES), torch.float32)
        self.returns, self.numbers, self.calls = Returns(), dict[str, int](), list[str]()
        self.generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(shape, generator=self.generator)
        self.given = {
            name: torch.randn(what, generator=self.generator) if isinstance(what, torch.Size) else what
            for name, what in given.items()
        }

    def trial(self, like: Trial | None = None) -> Trial:
        self.learn_calls()
        calls = self.calls
        if like is not None:
            plan, _ = self._observed([*like.tried])
            if (plan.gain, plan.norms, plan.modulated) != (like.gain, like.norms, like.modulated):
                raise LeftAlone("it is not like the other")
            self._compare(like)
            return like
        plan, roles, passed = self._observed([])[0], list[Role](), set[str]()
        # In the order in which they return. Where two branches are added up, the first may be of use only after the second.
        for path in (*calls, *(path for path in calls if "." not in path)):
            if any(role.path == path for role in roles):
                continue
            for how in _ways(self.block.get_submodule(path)):
                more, passes = self._observed([*roles, Role(path, *how)])
                if more.gain > plan.gain:
                    plan, roles = more, [*roles, Role(path, *how, passes=tuple(sorted(passes - passed - {path})))]
                    passed |= passes
                    break
        passes_of = {role.path: role.passes for role in roles}
        plan.roles = [replace(role, passes=passes_of[role.path]) for role in plan.roles]
        plan.tried = tuple(roles)
        if plan.gain:
            try:
                self._compare(plan)
            except LeftAlone:  # under autocast, what its norms give is its stream
                plan.follows, plan.roles = False, [replace(role, follows=False) for role in plan.roles]
                self._compare(plan)
            longer = {path: length for path, length in self.returns.lengths.items() if length > 1}
            if len(longer) < len(self.returns.lengths):  # the block may ask whether it is a tensor that it got
                self.returns.lengths = longer
                try:
                    self._run(self._clone(), self.x, training=True)
                except Exception:  # anybody's code
                    return plan
                self._compare(plan)
        return plan

    def learn_calls(self) -> None:
        """Puts the paths of the parts that are called into `calls`. If it raises, those that were."""
        for _ in range(_TRIES):
            clone, calls = self._clone(), dict[str, None]()
            for path, part in clone.named_modules():
                if path:
                    part.register_forward_hook(lambda *call, calls=calls, path=path: calls.setdefault(path))
            try:
                for training in (False, True):
                    self._run(clone, self.x, training)
                break
            except Exception as error:
                if not self.returns.learn(error):
                    raise
            finally:
                self.calls = [*calls]
        self.returns.are_known = True

    def _observed(self, roles: list[Role]) -> tuple[Trial, set[str]]:
        """What could be fused with these sources, and the paths of the modules that their outputs go through."""
        plan, passes, sums = replace(self.empty, norms={}, sums=[]), set[str](), list[_Sum]()
        roles = [replace(role, passes=()) for role in roles]
        for training in (False, True):
            # In the block's dtype: what it converts between a sum and a norm is another tensor there, and in fp32 the same.
            clone = self._clone().to(self.dtype)
            with torch.enable_grad():
                x = self.x.to(self.dtype, copy=True).requires_grad_() * 1
            paths = {part: path for path, part in clone.named_modules()}

            def see(part: nn.Module, args: Any, kwargs: Any, output: Any, paths: Any = paths) -> None:
                first = output[0] if type(output) in (tuple, list) and output else output
                if any(isinstance(t, Lazy) for t in (*args, *kwargs.values(), first)):
                    passes.add(paths[part])

            def watch(what: Any, t: Any, y: Any = None, paths: Any = paths, x: Tensor = x) -> None:
                if isinstance(what, Lazy) and what.residual is None:
                    plan.modulated = tuple(dict.fromkeys((*plan.modulated, what.roles[0].path)))
                elif isinstance(what, Lazy):
                    sums.append(_Sum(what.roles[0], what.but(), t, t._version))
                elif isinstance(t, Tensor):
                    if has_rows_of(t, x) and not plan.enters:
                        plan.enters = paths[what]
                    for one in sums:
                        if has_rows_of(t, one.r) and one.r._version == one.version and not one.norm:
                            one.norm, one.viewed = paths[what], t is not one.r

            sources = [role.path for role in roles]  # which have no hook but their own
            for part, path in paths.items():
                if path and path not in sources:
                    part.register_forward_hook(see, with_kwargs=True)
            fuse(clone, replace(self.empty, roles=roles))
            lazy.WATCH = watch
            try:
                with torch.enable_grad():
                    self._run(clone, x, training, given={name: t.to(self.dtype) for name, t in self._tensors().items()})
            except Exception:  # a source that the block can't do with
                return self.empty, passes
            finally:
                lazy.WATCH = None
            if any(isinstance(part, StandIn) and part.got_lazy for part in clone.modules()):
                return self.empty, passes
        return self._planned(plan, roles, sums), passes

    def _planned(self, plan: Trial, roles: list[Role], sums: list[_Sum]) -> Trial:
        found = {role.path: role for role in roles}
        for one in sums:
            before = [other for other in sums if other.r is one.of.residual and not (other.norm or other.of.parts)]
            if before and not one.of.parts and one.of.x1 is None is before[0].of.x1 and one.of.x.dtype == before[0].of.x.dtype:
                found[before[0].role.path] = replace(before[0].role, waits=True)
                one.of, one.with_waiting = one.of.but(x1=before[0].of.x), (before[0].role.path,)
                before[0].norm = "of another sum"
        useful = {*plan.modulated}
        plan.gain += 8 * len(plan.modulated)  # more than a sum and its norm, without scale and shift, in the two modes
        for one in sums:
            features = _features(one.of)
            if one.norm == "of another sum" or not (features or one.norm):
                continue
            plan.gain += 2 + len(features) + bool(one.norm)
            useful.update((one.role.path, *one.with_waiting, *(role.path for role in one.of.roles)))
            if one.norm:
                plan.norms[one.norm] = tuple(dict.fromkeys((*plan.norms.get(one.norm, ()), *features)))
                found[one.role.path] = replace(found[one.role.path], next_norm=one.norm, viewed=one.viewed)
            elif features not in plan.sums:
                plan.sums.append(features)
        if plan.enters and sums:
            plan.norms.setdefault(plan.enters, ())
            plan.gain += 1
        roles = [role for role in found.values() if role.path in useful]
        return replace(plan, roles=roles, enters=plan.enters if sums else "")

    def _compare(self, plan: Trial) -> None:
        """Raises LeftAlone if a fused clone computes something else."""
        plain, fused = self._clone(), self._clone()
        fuse(fused, plan)
        reentrant = partial(checkpoint, use_reentrant=True)
        for how, training, autocast, through in (
            ("in evaluation", False, False, None), ("in training", True, False, None),
            ("in evaluation with autocast", False, True, None), ("in training with autocast", True, True, None),
            ("under reentrant activation checkpointing", True, False, reentrant),
        ):  # fmt: skip
            with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, autocast, cache_enabled=False):
                wanted, found = (self._results(clone, training, through) for clone in (plain, fused))
            if differs := difference(wanted, found, torch.bfloat16 if autocast else torch.float32):
                raise LeftAlone(f"when its sums are computed with its norms, {differs}, {how}")

    def _results(self, clone: nn.Module, training: bool, through: Any = None) -> dict[str, Tensor]:
        """Outputs, what the block keeps as attributes, and all their gradients."""
        inputs = {name: t.clone().requires_grad_() for name, t in {"its input": self.x, **self._tensors()}.items()}
        leaves = inputs | {name: p.requires_grad_() for name, p in clone.named_parameters()}
        x, *others = [t * 1 for t in inputs.values()]
        found = floats_in(self._run(clone, x, training, through, dict(zip(self._tensors(), others, strict=True))), "its output")
        if not found:
            raise LeftAlone("it returns no tensor that could be compared")
        if x._version:
            raise LeftAlone("it changes the stream that it gets in place")
        for path, module in clone.named_modules():
            held = {f"{path}.{name}": t for name, t in vars(module).items() if isinstance(t, Tensor | list | tuple)}
            kept = floats_in(held, "what it keeps")
            leaves |= {name: t for name, t in kept.items() if not (t.is_leaf or through)}
            found |= kept
        for t in leaves.values():
            t.grad = None
            t.retain_grad()
        backward = [y for name, y in found.items() if name.startswith("its output") and y.requires_grad]
        torch.autograd.backward(backward, [upstream(y) for y in backward])  # which reentrant checkpointing asks for
        return found | {f"the gradient of {name}": t.grad for name, t in leaves.items() if t.grad is not None}

    def _tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.given.items() if isinstance(t, Tensor)}

    def _run(self, clone: nn.Module, x: Tensor, training: bool, through: Any = None, given: Any = None) -> Any:
        """given: tensors in place of those of the bench."""
        given = given or {}
        for module in clone.modules():
            module.training = training
        torch.default_generator.manual_seed(0)

        def forward(x: Tensor, *others: Tensor) -> Any:
            with SameDropout():
                return type(clone).forward(clone, x, **self.given | dict(zip(given, others, strict=True)))

        return through(forward, x, *given.values()) if through else forward(x, *given.values())

    def _clone(self) -> Any:
        """The block with random weights and with stand-ins."""
        self.generator.manual_seed(0)

        def stand_in(path: str, module: nn.Module) -> Any:
            if path in self.inside or _runs(module):
                return None
            return StandIn(module, path, self.numbers.setdefault(path, len(self.numbers)), self.returns)

        return clone_of(self.block, lambda p: torch.randn(p.shape, generator=self.generator), stand_in).requires_grad_(False)


def _features(of: Lazy) -> tuple[str, ...]:
    found = [feature for part, feature in _FEATURES.items() if part in of.parts]
    return tuple(found if of.x1 is None else [*found, "second branch"])
