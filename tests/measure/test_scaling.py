import numpy as np
import pytest

from measure.scaling import law, predicted

COMPUTE = np.array([1e14, 4e14, 1.6e15])


def losses_of(compute, floor=1.2, slope=0.8, exponent=0.3):
    return floor + slope * (compute / COMPUTE[0]) ** -exponent


def test_the_law_is_found_of_several_lines_at_once():
    lines = np.stack([losses_of(COMPUTE), losses_of(COMPUTE, 1.0, 0.5, 0.15), np.full(3, 2.0)])
    floor, slope, exponent = law(COMPUTE, lines)
    assert floor == pytest.approx([1.2, 1.0, 2.0], abs=0.02) and slope == pytest.approx([0.8, 0.5, 0.0], abs=0.02)
    assert exponent[:2] == pytest.approx([0.3, 0.15], abs=0.011)


def test_a_prediction_covers_what_is_drawn():
    draw, held = np.random.default_rng(0), 0
    for _ in range(60):
        told = predicted(COMPUTE, [losses_of(c) + draw.normal(0, 0.005, 8) for c in COMPUTE], 4 * COMPUTE[-1])
        held += told.holds(losses_of(4 * COMPUTE[-1]) + draw.normal(0, 0.005))
    assert held >= 53
    assert told.high - told.low < 0.1
