"""What rounding explains: how far arms are apart in one quantity, and operators that sum in another order.

The head of parity.py states the statistic. This module needs no model, corpus or config of ours, so that adoption/check.py can
use it for other people's models.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from measure.statistics import Interval, mean_interval

REFERENCE, REORDERED = "reference", "reordered"
ORDERS = 3  # of sums, beside PyTorch's own
LEVEL = 0.005
MARGIN = 1.25
BIAS = 0.1
# A loss or a norm over two steps has a ratio of up to 6 by chance (40 seeds, a model of width 32, bf16); more steps have less.
GROSS, GROSS_FEW = 30.0, 10.0
FEW = 3  # seeds
LARGEST = 1e9  # ratios stop here, so that JSON can hold what was divided by nothing or is no number


@dataclass(frozen=True)
class Quantity:
    """One thing that parity compares between the arms, and the verdict of one test of it."""

    name: str  # loss, gradient norm, gradient of a layer, parameters
    tested: Interval  # the tested arm's error ratio: its distance from fp32 over the expected one; geometric mean over seeds
    reordered: Interval  # the same of PyTorch's norms with other orders of summation: what a legitimate change looks like
    holds: bool
    excess: float = 0.0  # how far beyond what is allowed; orders failures by how bad they are
    failure: str = ""  # in words, if it does not hold

    @property
    def beside(self) -> str:
        return f"torch with its sums in other orders: {self.reordered.median:.2g} ×"


@dataclass(frozen=True)
class Distances:
    """One quantity at one seed; see the head of parity.py."""

    tested: float  # R_c
    reordered: float  # R_d, root of the mean square over orders
    tested_shift: float  # S_c
    reordered_shift: float  # S_d, root of the mean square over orders


class Sums:
    """Sums over elements that give the distances of a quantity. Its tensors can be added one after the other."""

    def __init__(self) -> None:
        self.elements = 0
        self.squares = np.zeros(3)  # of a, b − a, c − a
        self.shift = 0.0  # ⟨c − b, a⟩
        self.orders: list[np.ndarray] = []  # of each other order d the squares of d − a and d − b, and ⟨d − b, a⟩

    def add(self, a: Tensor, b: Tensor, c: Tensor, *orders: Tensor) -> None:
        a, b, c, *ds = (x.detach().to(a.device).double().flatten() for x in (a, b, c, *orders))
        self.elements += a.numel()
        self.squares += [float(x.dot(x)) for x in (a, b - a, c - a)]
        self.shift += float((c - b).dot(a))
        found = [np.array([float(x.dot(y)) for x, y in ((d - a, d - a), (d - b, d - b), (d - b, a))]) for d in ds]
        self.orders = [one + more for one, more in zip(self.orders, found, strict=True)] if self.orders else found

    def distances(self) -> Distances:
        size, torch_, tested = np.sqrt(self.squares / self.elements)
        reordered, order = np.sqrt(np.mean(self.orders, axis=0)[:2] / self.elements)
        # No correct program need be nearer than one unit in the last place of fp32: two that differ by less are as good as the
        # same bits, which a run may well have, and whose distance of 0 would have no logarithm.
        unit = float(size) * torch.finfo(torch.float32).eps + 1e-30
        expected = max(math.hypot(torch_, order), unit)
        ratios = (max(tested, unit) / expected, max(reordered, unit) / expected)
        shifts = np.array([self.shift, np.sqrt(np.mean(np.square(self.orders), axis=0)[2])])
        shifts = shifts / self.elements / max(size, 1e-30) / max(expected, unit / BIAS)  # and none is held to less here
        return Distances(*(_finite(float(x)) for x in (*ratios, *shifts)))

    def errors(self) -> list[float]:
        """rms(x − a) / rms(a) of the arms x = b, c, with a the reference."""
        return [_finite(float(error)) for error in np.sqrt(self.squares[1:] / max(self.squares[0], 1e-300))]


Keep = Callable[[str, Tensor | tuple[Tensor, ...]], None]  # gets the name of a norm site, and its output


@contextmanager
def hooked(sites: Mapping[str, nn.Module], keep: Keep) -> Iterator[None]:
    """Calls keep for each output of each site in the forward passes inside."""
    hooks = [site.register_forward_hook(lambda *call, name=name: keep(name, call[-1])) for name, site in sites.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def row_scales(
    sites: Mapping[str, nn.Module], rows: dict[str, Tensor], rounded_to: torch.dtype | None = None, watching: Callable = hooked
) -> Iterator[dict[str, Tensor]]:
    """⟨y, y_a⟩ / ⟨y_a, y_a⟩ of each row of a norm site's output, by site, in the (last) forward pass inside.

    Args:
        rows: y_a by site; the first arm, the reference, fills it.
        rounded_to: what the layers fed by the sites round y to; None: they don't.
        watching: how outputs are seen.
    """
    scales: dict[str, Tensor] = {}
    fills = not rows

    @torch.no_grad()
    def keep(name: str, output: Tensor | tuple[Tensor, ...]) -> None:
        y = (output[0] if isinstance(output, tuple) else output).detach()
        if fills:
            rows[name] = y
        a = rows[name]
        y = y.to(rounded_to or y.dtype).to(a.device, a.dtype)
        scales[name] = (y * a).sum(-1) / (a * a).sum(-1).clamp_min(1e-30)

    with watching(sites, keep):
        yield scales


def size_test(name: str, seeds: Sequence[Distances], level: float, exact: str) -> Quantity:
    """Whether the tested arm is farther from the reference, in `exact`, than rounding and other orders of sums explain."""
    tested, reordered = np.log([(one.tested, one.reordered) for one in seeds]).T
    excess = tested - np.maximum(reordered, 0.0)
    fails = excess.mean() > math.log(GROSS_FEW) or excess.max() > math.log(GROSS)
    if len(seeds) > FEW:
        fails = fails or _p_above(excess, math.log(MARGIN), excess.std(ddof=1)) < level
    intervals = _interval(tested, math.exp), _interval(reordered, math.exp)
    found = Quantity(name, *intervals, not bool(fails), float(excess.mean()))
    said = f"{name} is {found.tested.median:.3g} × as far from {exact} as rounding explains ({found.beside})"
    return replace(found, failure=said if fails else "")


def sign_test(name: str, seeds: Sequence[Distances], level: float, over: str = "seeds") -> Quantity:
    """Whether the tested arm is off in one direction over the seeds."""
    tested, reordered = np.array([(one.tested_shift, one.reordered_shift) for one in seeds]).T
    towards = tested * np.sign(tested.mean())
    fails = towards.mean() > GROSS_FEW or abs(tested).max() > GROSS
    if len(seeds) > FEW:
        deviation = max(towards.std(ddof=1), float(np.sqrt((reordered**2).mean())))
        fails = fails or _p_above(towards, BIAS, deviation) < level / 2
    # a shift is a part of the distance, so a quantity that fails by both is better told by its distance
    excess = math.log(max(abs(float(tested.mean())), 1e-9)) - 100
    found = Quantity(f"{name}, shift", _interval(tested), _interval(reordered), not bool(fails), excess)
    shift = f"{found.tested.median:+.2g} × what rounding explains ({found.beside})"
    return replace(found, failure=f"{name} is shifted in one direction over the {over}, by {shift}" if fails else "")


def _p_above(samples: np.ndarray, bound: float, deviation: float) -> float:
    """Chance of samples such as these if their mean is at most `bound`: Student's one-sided t-test."""
    above = float(samples.mean()) - bound
    if deviation == 0.0:
        return 0.0 if above > 0 else 1.0
    return float(special.stdtr(len(samples) - 1, -above / deviation * math.sqrt(len(samples))))


def _interval(samples: np.ndarray, inverse: Callable[[float], float] = float) -> Interval:
    """Mean over seeds and its interval, taken back by `inverse`."""
    found = mean_interval(samples)
    most = math.log(LARGEST) if inverse is math.exp else LARGEST
    return Interval(*(inverse(min(x, most)) for x in (found.median, found.low, found.high)))


def _finite(x: float) -> float:
    return LARGEST if math.isnan(x) else min(max(x, -LARGEST), LARGEST)


def in_another_order(norm: Callable[[Tensor, Tensor], Tensor], r: Tensor, number: int = 0) -> Tensor:
    """norm(r), with the rows and features of r shuffled before the norm and put back after it.

    Args:
        norm: called with rows [M, N] and the order int64 [N] in which their features stand, which its weights have to follow.
        number: of the order.
    """
    rows = r.reshape(-1, r.shape[-1])
    row_order, column_order = (shuffled(n, r.device, number) for n in rows.shape)
    y = norm(rows.index_select(0, row_order).index_select(1, column_order), column_order)
    return y.index_select(1, column_order.argsort()).index_select(0, row_order.argsort()).view(r.shape)


@lru_cache
def shuffled(n: int, device: torch.device, number: int) -> Tensor:
    """A fixed random order of n things, int64 [n]. A reversal would leave vector lanes with the same elements."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(n + (number << 32)), device="cpu").to(device)
