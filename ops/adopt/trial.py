"""Which sums of a block a norm can compute along: its own forward is run with stand-ins for its sublayers.

The trial runs a clone on the CPU, with random weights, twice: with tensors, and with a stream. Both must give the same. What
the stream and its branches met on their way says what one kernel computes, and which parts of the block have to make a branch.
The block itself is not run and not changed; its weights may be anywhere, on meta too.
"""

import inspect
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import lazy
from .lazy import Lazy, settled
from .norms import AdoptedNorm
from .recognise import undisturbed
from .stand_ins import SameDropout, StandIn, on_cpu

_TOKENS = 16
_TOLERANCE = 1e-3  # relative to the largest value: LayerScale and Gemma's weights make large and small ones


@dataclass
class Trial:
    """What was found of a block."""

    width: int
    argument: str  # the name of its stream
    norms: dict[str, tuple[str, ...]] = field(default_factory=dict)  # path of a norm → what its kernel does along
    leaves: bool = False  # the block hands on a sum
    parts: set[str] = field(default_factory=set)  # paths of what has to make a branch of its output
    feeds: set[str] = field(default_factory=set)  # of sublayers whose output is added
    plain: set[str] = field(default_factory=set)  # and of sublayers that got something lazy
    sums: list[tuple[str, ...]] = field(default_factory=list)  # what kernels do that compute no norm of the sum

    @property
    def fused(self) -> int:
        return 2 * len(self.norms) + len(self.sums) + self.leaves


def try_block(block: nn.Module) -> Trial | str:
    """What can be fused in a block whose norms are replaced; or in words why nothing can."""
    norms = [m for m in block.modules() if isinstance(m, AdoptedNorm)]
    if not norms:
        return "it has no replaced norm"
    if "forward" in block.__dict__:
        return "its forward is replaced on the instance, by a tool that wraps modules; adopt it before that"
    widths = {m.formula.width for m in norms if m.formula.width is not None}
    if not widths:  # norms without weights take any width, so a matrix has to tell
        widths = {m.in_features for m in block.modules() if isinstance(m, nn.Linear)}
    tried: list[Trial] = []
    why = "" if widths else "it has no matrix that tells the width of its stream"
    with undisturbed(torch.device("cpu")):
        for width, run_norms in product(sorted(widths, reverse=True), (True, False)):
            inside = frozenset(_with_norms(block, width) if run_norms else ())
            found = _try(block, width, inside)
            if isinstance(found, str):
                why = why or found
                continue
            for part in sorted(found.plain):  # their own forwards may add to the stream that they get
                more = _try(block, width, inside | {part})
                if isinstance(more, Trial) and more.fused > found.fused:
                    inside, found = inside | {part}, more
            tried.append(found)
    if not tried:
        return why
    best = max(tried, key=lambda trial: trial.fused)
    return best if best.norms or best.sums else "none of its replaced norms follows a sum, or is followed by one"


def _with_norms(block: nn.Module, width: int) -> list[str]:
    """Paths of the parts in which the stream is normed."""
    norms = {m for m in block.modules() if isinstance(m, AdoptedNorm) and m.formula.width in (None, width)}
    return [path for path, part in block.named_modules(remove_duplicate=False) if not norms.isdisjoint(part.modules())]


def _try(block: nn.Module, width: int, inside: frozenset[str]) -> Trial | str:
    _, *parameters = inspect.signature(type(block).forward).parameters.values()
    if not parameters or parameters[0].kind is parameters[0].VAR_KEYWORD:
        return "its forward takes no x"
    x, *others = parameters
    needed = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    why = ""
    for shape, given in product(((2, _TOKENS), (2, 4, 4)), (None, (4, 4)) if needed else (None,)):
        run = _Run(block, width, inside, (*shape, width), dict.fromkeys(needed, given))
        for _ in range(12):  # each learns one more thing about what the sublayers return
            try:
                return run.found(x.name)
            except _Differs:
                why = why or "it computes something else when its sums are computed later"
                break
            except Exception as error:  # anybody's code
                if not (isinstance(error, ValueError) and "values to unpack" in str(error) and run.asked):
                    message = (str(error).splitlines() or [""])[0]
                    why = why or f"trying it with stand-ins for its sublayers raised {type(error).__name__}: {message}"
                    break
                run.returns[run.asked] += 1  # the last stand-in that was unpacked returns another number of things
    return why


class _Differs(Exception):
    pass


class _Event(NamedTuple):
    """What happened to a sum."""

    kind: str  # normed, summed, or left: handed on
    path: str  # of the norm
    features: tuple[str, ...]  # what the kernel does along
    enters: bool  # from the block before


class _Run:
    """A block's clone, in which the parts `inside` run as they are; x has `shape`, other arguments are `given`."""

    def __init__(self, block: nn.Module, width: int, inside: frozenset[str], shape: tuple, given: dict[str, Any]) -> None:
        self.width, self.inside, self.given = width, inside, given
        self.returns: dict[str, int] = {}  # how many things a stand-in returns that is taken for a tuple
        self.asked = ""  # the stand-in whose output was unpacked last
        self.branches: set[str] = set()  # stand-ins that make a branch
        self.got_lazy: set[str] = set()
        self.made: dict[int, tuple[str, Tensor]] = {}  # address of a stand-in's output → its path
        self.generator = torch.Generator().manual_seed(0)
        self.stand_ins: dict[str, StandIn] = {}
        self.paths: dict[int, str] = {}
        self.clone = self._clone(block, "")
        self.residual, self.hidden = (torch.randn(shape, generator=self.generator) for _ in range(2))

    def found(self, argument: str) -> Trial:
        trial, events = Trial(self.width, argument), list[_Event]()
        for training in (False, True):
            for module in self.clone.modules():
                module.training = training
            self.branches = set()
            expected = self._call(self.residual + self.hidden)
            self.branches = set(self.stand_ins)
            met, feeds = self._traced(expected)
            self.branches = set(feeds)
            for path in sorted(feeds):  # those that can do without stay as they are
                self.branches.remove(path)
                if self._traced(expected)[0] != met:
                    self.branches.add(path)
            self.got_lazy.clear()
            events += self._traced(expected)[0]
            trial.feeds |= feeds
            trial.parts |= self.branches
            trial.plain |= self.got_lazy
        left = [event.features for event in events if event.kind == "left"]
        trial.leaves = bool(left)
        for event in events:
            if event.enters and not left:  # no block before it hands on a sum
                continue
            along = _merged(event.features, *left if event.enters else ())
            if event.kind == "normed":
                trial.norms[event.path] = _merged(trial.norms.get(event.path, ()), along)
            elif event.kind == "summed" and along and along not in trial.sums:
                trial.sums.append(along)
        return trial

    def _traced(self, expected: Any) -> tuple[list[_Event], set[str]]:
        """What happens to sums, and the paths of the stand-ins that are added."""
        self.made.clear()
        lazy.TRACE = trace = []
        try:
            output = self._call(Lazy(self.hidden, self.residual))
        finally:
            lazy.TRACE = None
        first = output
        while isinstance(first, tuple | list) and first:
            first = first[0]
        if isinstance(first, Lazy) and first.residual is not None and first.x is not None:
            trace.append(("left", first.then()))
        events, feeds = list[_Event](), set[str]()
        for norm, of in trace:
            kind = norm if norm == "left" else "summed" if norm is None else "normed"
            addresses = {t.data_ptr() for t in (of.x, of.x1) if t is not None}
            feeds |= {self.made[address][0] for address in addresses & self.made.keys()}
            events.append(_Event(kind, self.paths.get(id(norm), ""), _features(of), self.hidden.data_ptr() in addresses))
        a, b = _tensors(settled(expected)), _tensors(settled(output))
        if len(a) != len(b) or not all(map(_close, a, b)):
            raise _Differs
        return events, feeds

    def _call(self, x: Any) -> Any:
        torch.manual_seed(0)
        with SameDropout():
            return type(self.clone).forward(self.clone, x, **self.given)

    def _clone(self, module: nn.Module, path: str) -> Any:
        if path and path not in self.inside and not self._runs(module):
            self.stand_ins[path] = StandIn(module, path, self)
            return self.stand_ins[path]
        clone: Any = object.__new__(type(module))
        clone.__dict__ |= {name: on_cpu(value) for name, value in module.__dict__.items() if name != "forward"}
        hooks = [name for name in clone.__dict__ if name.endswith("_hooks") or name.startswith("_forward_")]
        clone.__dict__ |= {
            **{name: OrderedDict() for name in hooks},
            "_parameters": {name: self._random(p) for name, p in module._parameters.items()},
            "_buffers": {name: on_cpu(b) for name, b in module._buffers.items()},
            "_modules": {n: m and self._clone(m, f"{path}.{n}" if path else n) for n, m in module._modules.items()},
            "gradient_checkpointing": False,
        }
        self.paths[id(clone)] = path
        return clone

    def _runs(self, module: nn.Module) -> bool:
        """Whether a part runs as it is in any case: norms, scales, what has no weights, and containers."""
        if isinstance(module, AdoptedNorm | nn.ModuleList | nn.ModuleDict | nn.Sequential):
            return True
        return all(not is_lazy(p) and p.dim() < 2 for p in module.parameters()) and next(module.buffers(), None) is None

    def _random(self, p: Tensor | None) -> Tensor | None:
        return None if p is None else nn.Parameter(torch.randn(p.shape, generator=self.generator), requires_grad=False)


def _features(of: Lazy) -> tuple[str, ...]:
    found = {
        "norm of the branch": of.branch_norm is not None, "layer scale": of.branch_weight is not None, "scale": of.scale != 1.0,
        "drop path": of.rowscale is not None, "second branch": of.x1 is not None, "dropout": of.dropout_p > 0.0,
    }  # fmt: skip
    return tuple(name for name, is_there in found.items() if is_there)


def _merged(*features: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in features for name in some))


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, tuple | list | dict):
        return [t for one in (output.values() if isinstance(output, dict) else output) for t in _tensors(settled(one))]
    return [output] if isinstance(output, Tensor) else []


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    size = float(a.double().abs().max().nan_to_num()) if a.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=1e-5 * max(size, 1e-3), equal_nan=True)
