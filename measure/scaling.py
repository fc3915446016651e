"""A power law through losses at several sizes, and what it predicts at another one."""

from collections.abc import Sequence

import numpy as np

from measure.statistics import RESAMPLES, Interval

EXPONENTS = np.linspace(0.02, 1.0, 99)


def law(compute: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E, A and α of L = E + A·C^−α by least squares over α in EXPONENTS, with E and A of 0 or more; C in units of the first.

    Args:
        compute: [sizes], of three sizes or more.
        losses: [..., sizes]: each line has a law of its own.
    """
    x = (compute / compute[0])[None, :] ** -EXPONENTS[:, None]  # [exponents, sizes]
    y, mean = losses[..., None, :], x.mean(-1)
    slope = ((x - mean[:, None]) * y).sum(-1) / ((x - mean[:, None]) ** 2).sum(-1)
    floor = y.mean(-1) - slope * mean
    slope = np.where(floor < 0, (x * y).sum(-1) / (x * x).sum(-1), slope)
    flat = slope < 0
    floor, slope = np.where(flat, y.mean(-1), np.maximum(floor, 0.0)), np.where(flat, 0.0, slope)
    misses = ((floor[..., None] + slope[..., None] * x - y) ** 2).sum(-1)
    at = misses.argmin(-1)
    chosen = [np.take_along_axis(of, at[..., None], -1)[..., 0] for of in (floor, slope)]
    return chosen[0], chosen[1], EXPONENTS[at]


def predicted(compute: Sequence[float], losses: Sequence[Sequence[float]], at: float) -> Interval:
    """The loss of one run at another size, with a 95 % interval: a bootstrap over the seeds of each size, and the noise of the
    run as at the last size.

    Args:
        losses: by size those of its seeds.
    """
    sizes, draw = np.asarray(compute, np.float64), np.random.default_rng(0)

    def value(of: np.ndarray) -> np.ndarray:
        floor, slope, exponent = law(sizes, of)
        return floor + slope * (at / sizes[0]) ** -exponent

    drawn = np.stack([draw.choice(np.asarray(of), (RESAMPLES, len(of))).mean(-1) for of in losses], -1)
    last = np.asarray(losses[-1])
    found = value(drawn) + draw.choice(last - last.mean(), RESAMPLES)
    low, high = np.percentile(found, (2.5, 97.5))
    return Interval(float(value(np.array([np.mean(of) for of in losses]))), float(low), float(high))
