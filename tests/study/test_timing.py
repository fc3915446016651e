"""Step times of a study: what is timed, what is kept, and what follows for equal time."""

import pytest
import torch

from configs import Config
from measure.comparison import AGAIN as TORCH_AGAIN
from measure.statistics import LEAST_SAMPLES, paired_ratio
from study.analysis import analyse
from study.arms import Arm, Study
from study.report import _times
from study.runs import AGAIN, Found, Result, read
from study.timing import BASELINE, cycles_of
from tests.runs import composed


def test_each_arm_is_timed_beside_torch_twice_and_the_baseline(tiny, tmp_path):
    import compare

    sweep = ["norm.kind=layernorm,rmsnorm", "train.steps=6", "eval.batches=1", "compare.timing_cycles=6"]
    assert compare.main([*tiny, *sweep, f"folder={tmp_path / 'study'}"]) == 0
    times = read(tmp_path / "study" / "runs.jsonl").times
    assert [list(of) for of in times.values()] == [["fused", "torch", TORCH_AGAIN], ["fused", "torch", TORCH_AGAIN, BASELINE]]
    assert all(len(blocks) == 2 * 6 and min(blocks) > 0 for of in times.values() for blocks in of.values())
    assert "torch / own (95 %)" in (tmp_path / "study" / "report.md").read_text()


def test_a_cpu_times_nothing_unless_asked(tiny):
    cfg = composed(tiny)
    assert cycles_of(cfg, torch.device("cpu")) == 0 and cycles_of(cfg, torch.device("cuda")) == LEAST_SAMPLES
    cfg.compare.timing_cycles = 8
    assert cycles_of(cfg, torch.device("cpu")) == 8


def test_ratios_are_paired_by_cycle_and_the_loss_at_equal_time_is_that_of_the_steps_that_fit():
    def runs(arm, offset):
        return [Result(arm, 1e-3, seed, [(0, 4.0), (900, 2.0 + offset)]) for seed in (1, 2)]

    drift = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]  # from cycle to cycle, the same for all that run in it
    blocks = {name: [ms * slow for slow in drift for _ in "ab"] for name, ms in
              {"fused": 3.0, "torch": 6.0, TORCH_AGAIN: 6.06, BASELINE: 2.0}.items()}  # fmt: skip
    times = {"a": {name: of for name, of in blocks.items() if name != BASELINE}, "b": blocks}
    cfg = Config()
    study = Study([Arm("a", cfg), Arm("b", cfg)], [1e-3], [1, 2], {})
    made = analyse(study, Found([*runs("a", 0.0), *runs("b", -1.0), *runs("a" + AGAIN, 0.1)], times))
    a, b = made.arms
    assert b.price.over_torch == paired_ratio([6 * slow for slow in drift], [3 * slow for slow in drift])
    assert b.price.of_baseline.median == pytest.approx(1.5) and b.price.of_baseline.high == pytest.approx(1.5)
    assert b.price.again.median == pytest.approx(1 / 1.01)
    assert a.equal_time.median == pytest.approx(2.0) and b.equal_time.median == pytest.approx(4.0 - 3.0 / 1.5)
    assert b.equal_time_difference.median == pytest.approx(0.0)
    header, rows = _times(made)
    assert header[1:3] == ["fused, ms", "torch, ms"] and all(len(row) == len(header) for row in rows)
