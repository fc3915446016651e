"""The loss of an arm as a parabola in log rate, through its best rate and the two beside it."""

import math
from collections.abc import Mapping

import numpy as np

STEEP = 4.0  # above its best rate a loss rises like a cliff, which no parabola follows: one side rises at most
DRAWS = 1000


def beside(losses: Mapping[float, float], best: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Log rates and losses of the three, with a cliff cut off; None where the best rate is at the end, or nothing rises."""
    rates = sorted(losses)
    at = rates.index(best)
    if not (0 < at < len(rates) - 1 and math.isfinite(losses[best])):
        return None
    near = rates[at - 1 : at + 2]
    rises = [max(losses[rate] - losses[best], 0.0) for rate in near]
    least = min(rises[0], rises[2])
    capped = [losses[best] + min(rise, STEEP * least) for rise in rises]
    return (np.log(near), np.array(capped)) if least > 0 and math.isfinite(least) else None


def lowest(rates: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log rate and loss of the lowest point of a parabola between the outer two of its three points.

    Args:
        losses: [..., 3], of one parabola or many.
    """
    a, b, c = np.moveaxis(np.linalg.solve(np.vander(rates, 3), losses[..., None])[..., 0], -1, 0)
    end = np.where(losses[..., 0] < losses[..., 2], rates[0], rates[2])
    turn = np.clip(-b / np.where(a > 0, 2 * a, np.inf), rates[0], rates[2])
    at = np.where(a > 0, turn, end)
    return at, (a * at + b) * at + c


def cost(losses: Mapping[float, float], noise: Mapping[float, float], best: float, chosen_by_same: bool) -> float:
    """What the choice of the best rate may cost, in nats: over draws of the losses, the root of the mean square of the distance
    between the parabola at this rate and its lowest point. Where the runs that are compared have chosen the rate too, the mean
    by which the lowest of the drawn losses looks better than it is comes to that.

    Args:
        losses: by rate the mean over runs; infinite where one failed.
        noise: by rate the standard error of that mean.
    """
    draw, square = np.random.default_rng(0), 0.0
    if (points := beside(losses, best)) is not None:
        rates, means = points
        near = [noise[rate] for rate in sorted(losses)][sorted(losses).index(best) - 1 :][:3]
        drawn = means + np.array(near) * draw.standard_normal((DRAWS, 3))
        square += float(np.mean((drawn[:, 1] - lowest(rates, drawn)[1]) ** 2))
    finite = [rate for rate in losses if math.isfinite(losses[rate])]
    if chosen_by_same and len(finite) > 1:
        means, errors = np.array([losses[rate] for rate in finite]), np.array([noise[rate] for rate in finite])
        drawn = means + errors * draw.standard_normal((DRAWS, len(finite)))
        chosen = drawn.argmin(axis=1)
        square += float(np.mean(means[chosen] - drawn[np.arange(DRAWS), chosen])) ** 2
    return math.sqrt(square)
