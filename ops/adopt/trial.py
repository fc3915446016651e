"""Which sums of a block a norm can compute along: its own forward is run with stand-ins for its sublayers.

The trial runs a clone on the CPU, with random weights, twice: with tensors, and with a Stream. Both must give the same. What
the Stream and its branches met on their way says what one kernel computes, and which parts of the block have to make a Branch.
The block itself is not run and not changed; its weights may be anywhere, on meta too.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from . import lazy
from .lazy import Branch, Lazy, Stream
from .norms import AdoptedNorm
from .stand_ins import Anything, HalvedDropout, StandIn, on_cpu

_TOKENS = 16
_TOLERANCE = 1e-3  # relative to the largest value: LayerScale and Gemma's weights make large and small ones


@dataclass
class Trial:
    """What was found of a block."""

    width: int
    argument: str  # the name of its stream
    norms: dict[str, tuple[str, ...]] = field(default_factory=dict)  # path of a norm → what its kernel does along
    leaves: bool = False  # the block hands on a sum
    parts: list[str] = field(default_factory=list)  # paths of what has to make a Branch of its output
    feeds: list[str] = field(default_factory=list)  # of sublayers whose output is added
    plain: list[str] = field(default_factory=list)  # and of sublayers that got something lazy
    sums: list[tuple[str, ...]] = field(default_factory=list)  # what kernels do that compute no norm of the sum

    @property
    def fused(self) -> int:
        return 2 * len(self.norms) + len(self.sums) + self.leaves


def try_block(block: nn.Module) -> Trial | str:
    """What can be fused in a block whose norms are replaced; or in words why nothing can."""
    norms = [m for m in block.modules() if isinstance(m, AdoptedNorm)]
    if not norms:
        return "it has no replaced norm"
    widths = {m.formula.width for m in norms if m.formula.width is not None}
    if not widths:  # norms without weights take any width, so a matrix has to tell
        widths = {m.in_features for m in block.modules() if isinstance(m, nn.Linear)}
    if "forward" in block.__dict__:
        return "its forward is replaced on the instance, by a tool that wraps modules; adopt it before that"
    best, why = None, ""
    with _quiet():
        for width, deep in product(sorted(widths, reverse=True), (True, False)):
            found = _try(block, width, deep, ())
            if isinstance(found, str):
                why = why or found
                continue
            inside: tuple[str, ...] = ()
            for part in found.plain:  # it got the stream, which its own forward may add to
                more = _try(block, width, deep, (*inside, part))
                if isinstance(more, Trial) and more.fused > found.fused:
                    inside, found = (*inside, part), more
            if best is None or found.fused > best.fused:
                best = found
    if best is None:
        return why
    if best.norms or best.sums:
        return best
    return "none of its replaced norms follows a sum, or is followed by one"


class _quiet:
    def __enter__(self) -> None:
        self.entered = [
            torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), catch_warnings(),
            torch.device("cpu"), torch.compiler.set_stance("force_eager"),
        ]  # fmt: skip
        for context in self.entered:
            context.__enter__()
        simplefilter("ignore")
        self.dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self.dtype)
        for context in reversed(self.entered):
            context.__exit__(*error)


def _try(block: nn.Module, width: int, deep: bool, inside: tuple[str, ...]) -> Trial | str:
    forward = inspect.signature(type(block).forward)
    names = list(forward.parameters.values())[1:]
    if not names or names[0].kind is names[0].VAR_KEYWORD:
        return "its forward takes no x"
    needed = [p.name for p in names[1:] if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    why = ""
    for shape, given in product(((2, _TOKENS), (2, 4, 4)), _placeholders(needed)):
        run = _Run(block, width, deep, inside, (*shape, width), dict.fromkeys(needed, given))
        for _ in range(12):  # each learns one more thing about what the sublayers return
            try:
                return run.found(names[0].name)
            except _Differs as error:
                why = why or str(error)
                break
            except Exception as error:  # anybody's code
                if run.learnt_from(error):
                    continue
                message = (str(error).splitlines() or [""])[0]
                why = why or f"trying it with stand-ins for its sublayers raised {type(error).__name__}: {message}"
                break
    return why


def _placeholders(needed: list[str]) -> list[Any]:
    return [None, Anything(), (4, 4), 4] if needed else [None]


class _Differs(Exception):
    pass


class _Run:
    def __init__(
        self, block: nn.Module, width: int, deep: bool, inside: tuple[str, ...], shape: tuple[int, ...], given: dict[str, Any]
    ) -> None:
        self.width, self.deep, self.inside, self.given = width, deep, inside, given
        self.returns: dict[str, int] = {}  # how many things a stand-in returns; 0: a tensor
        self.asked: str = ""  # the stand-in whose output was unpacked last
        self.mode = ""  # learning, tensors, lazy
        self.branches: set[str] = set()  # stand-ins that make a Branch
        self.got_lazy: set[str] = set()
        self.sources: set[str] = set()
        self.generator = torch.Generator().manual_seed(0)
        self.stand_ins: dict[str, StandIn] = {}
        self.paths: dict[int, str] = {}
        self.clone = self._clone(block, "")
        self.residual, self.hidden = (torch.randn(shape, generator=self.generator) for _ in range(2))

    def found(self, argument: str) -> Trial:
        trial = Trial(self.width, argument)
        events: list[Any] = []
        for training in (False, True):
            for module in _modules(self.clone):
                module.__dict__["training"] = training
            self._call("learning", self.residual + self.hidden)
            expected = self._call("tensors", self.residual + self.hidden)
            self.branches, self.got_lazy, self.sources = set(self.stand_ins), set(), set()
            met = self._traced(expected)
            trial.feeds += [name for name in self.sources & self.branches if name not in trial.feeds]
            for name in list(self.branches):  # those that can do without stay as they are
                self.branches.remove(name)
                if self._traced(expected) != met:
                    self.branches.add(name)
            self.got_lazy.clear()
            met = self._traced(expected)
            trial.parts += [name for name in self.branches if name not in trial.parts]
            trial.plain += [name for name in self.got_lazy if name not in trial.plain]
            events += met
        trial.leaves = any(kind == "left" for kind, _, _ in events)
        left = tuple(dict.fromkeys(f for kind, _, features in events if kind == "left" for f in features if f != "entering"))
        for kind, path, features in events:
            entering = "entering" in features
            if entering and not trial.leaves:  # no block before it hands on a sum
                continue
            features = tuple(f for f in (*features, *(left if entering else ())) if f != "entering")
            if kind == "normed":
                known = trial.norms.get(path, ())
                trial.norms[path] = known + tuple(f for f in features if f not in known)
            elif kind != "left" and features and features not in trial.sums:
                trial.sums.append(features)
        return trial

    def _traced(self, expected: Any) -> list[Any]:
        trace: list[Any] = []
        lazy.TRACE = trace
        try:
            stream = Stream(self.residual, Branch(self.hidden, source="entering"))
            output = self._call("lazy", stream)
            first = _first(output)
            left = [("left", None, first.branch)] if isinstance(first, Stream) and first.branch is not None else []
        finally:
            lazy.TRACE = None
        self.sources |= {branch.source for _, _, *more in [*trace, *left] for branch in more}
        events = [
            (kind, self.paths.get(id(norm), ""), _features(branch))
            for kind, norm, *more in [*trace, *left] if kind != "used by" for branch in more
        ]  # fmt: skip
        tensors_a, tensors_b = _tensors(expected), _tensors(output)
        if len(tensors_a) != len(tensors_b) or not all(map(_close, tensors_a, tensors_b)):
            raise _Differs("it computes something else when its sums are computed later")
        return events

    def _call(self, mode: str, x: Any) -> Any:
        self.mode = mode
        torch.manual_seed(0)
        with HalvedDropout():
            return type(self.clone).forward(self.clone, x, **self.given)

    def learnt_from(self, error: Exception) -> bool:
        """Whether the last stand-in whose output was unpacked now returns another number of things."""
        wrong = isinstance(error, ValueError) and "values to unpack" in str(error) and self.mode == "learning"
        if wrong and self.asked and self.returns[self.asked] < 5:
            self.returns[self.asked] += 1
            return True
        return False

    def _clone(self, module: nn.Module, path: str) -> Any:
        if path and path not in self.inside and not self._runs(module):
            self.stand_ins[path] = StandIn(module, path, self)
            return self.stand_ins[path]
        clone: Any = object.__new__(type(module))
        clone.__dict__.update({name: on_cpu(value) for name, value in module.__dict__.items()})
        for name in [name for name in clone.__dict__ if name.endswith("_hooks") or name.startswith("_forward_")]:
            clone.__dict__[name] = OrderedDict()
        clone.__dict__.pop("forward", None)
        clone.__dict__ |= {
            "_parameters": {name: self._random(p) for name, p in module._parameters.items()},
            "_buffers": {name: on_cpu(b) for name, b in module._buffers.items()},
            "_modules": {n: m and self._clone(m, f"{path}.{n}" if path else n) for n, m in module._modules.items()},
            "gradient_checkpointing": False,
        }
        self.paths[id(clone)] = path
        return clone

    def _runs(self, module: nn.Module) -> bool:
        """Whether a part runs as it is: norms, scales, what has no weights, and what contains norms of the stream."""
        if isinstance(module, AdoptedNorm | nn.ModuleList | nn.ModuleDict):
            return True
        parameters = list(module.parameters())
        if (
            not any(map(is_lazy, parameters))
            and all(p.dim() < 2 for p in parameters)
            and not any(True for _ in module.buffers())
        ):
            return True
        inside = self.deep and any(
            isinstance(m, AdoptedNorm) and m.formula.width in (None, self.width) for m in module.modules()
        )
        return inside or isinstance(module, nn.Sequential)

    def _random(self, p: Tensor | None) -> Tensor | None:
        return None if p is None else nn.Parameter(torch.randn(p.shape, generator=self.generator), requires_grad=False)


def _modules(clone: Any) -> Iterator[Any]:
    yield clone
    for child in clone._modules.values():
        if child is not None:
            yield from _modules(child)


def _features(branch: Branch) -> tuple[str, ...]:
    factor = branch.factor * 2 ** len(branch.notes)
    found = (
        ("norm of the branch", branch.norm is not None),
        ("layer scale", branch.weight is not None),
        ("scale", factor != 1.0),
        ("drop path", branch.rowscale is not None),
        ("second branch", branch.more is not None),
    )
    entering = ("entering",) if branch.source == "entering" else ()
    return (*entering, *[name for name, is_there in found if is_there], *branch.notes)


def _first(output: Any) -> Any:
    if isinstance(output, tuple | list) and output:
        return _first(output[0])
    return output


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Lazy):
        return [output.tensor()]
    if isinstance(output, tuple | list):
        return [t for one in output for t in _tensors(one)]
    if isinstance(output, dict):
        return [t for one in output.values() for t in _tensors(one)]
    return [output] if isinstance(output, Tensor) else []


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    size = float(a.double().abs().max().nan_to_num()) if a.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=_TOLERANCE, atol=1e-5 * max(size, 1e-3), equal_nan=True)
