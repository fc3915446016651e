"""Step times of a study: what is timed, what is kept, and what follows for equal time."""

import pytest

from configs import Config
from measure.comparison import AGAIN as TORCH_AGAIN
from measure.statistics import paired_ratio
from study.analysis import analyse
from study.arms import Arm, Study
from study.runs import AGAIN, Found, Result
from study.timing import BASELINE


def test_ratios_are_paired_by_cycle_and_the_loss_at_equal_time_is_that_of_the_steps_that_fit():
    def runs(arm, offset):
        return [Result(arm, 1e-3, seed, [(0, 4.0), (900, 2.0 + offset + (seed - 1.5) / 1000)]) for seed in (1, 2)]

    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]  # from cycle to cycle, the same for all that run in it
    typical = {"fused": 3.0, "torch": 6.0, TORCH_AGAIN: 6.06, BASELINE: 2.0}
    blocks = {name: [ms * slow for slow in drift for _ in "ab"] for name, ms in typical.items()}
    times = {"a": {name: of for name, of in blocks.items() if name != BASELINE}, "b": blocks}
    study = Study([Arm("a", Config()), Arm("b", Config())], [1e-3], [1, 2], {})
    again = [Result("a" + AGAIN, 1e-3, seed, [(0, 4.0), (900, 2.0 + seed / 100)]) for seed in (3, 4)]
    a, b = analyse(study, Found([*runs("a", 0.0), *runs("b", -1.0), *again], times)).arms
    assert b.price.over_torch == paired_ratio([6 * slow for slow in drift], [3 * slow for slow in drift])
    assert b.price.of_baseline.median == pytest.approx(1.5) and b.price.of_baseline.high == pytest.approx(1.5)
    assert b.price.again.median == pytest.approx(1 / 1.01)
    assert a.equal_time.median == pytest.approx(2.0) and b.equal_time.median == pytest.approx(4.0 - 3.0 / 1.5)
    assert b.equal_time_difference.median == pytest.approx(0.0)
