"""An ablation on disk: what is saved is what is loaded."""

import dataclasses
import json

import pytest

from ablation import records
from measure.comparison import FUSED, TORCH
from tests.ablation import results
from training.attribution import GROUPS

FILES = ["kernels.jsonl", "parity.jsonl", "report.json", "steps.jsonl"]


@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_saved_is_what_is_loaded_and_numbers_that_json_lacks_survive(tmp_path, kernels):
    found = results.ablation(kernels=kernels)
    parity = found.parity[0]
    for losses in (parity.losses, parity.losses | {FUSED: [[float("inf")] * parity.steps] * len(parity.seeds)}):
        found = dataclasses.replace(found, parity=[dataclasses.replace(parity, losses=losses)])
        records.save(found, tmp_path)
        assert records.load(tmp_path) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


def test_raw_files_have_a_line_for_each_block_step_or_kernel_and_the_report_has_none_of_them(tmp_path):
    records.save(found := results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager"], seeds=2), tmp_path)
    (cell,), (parity,) = found.cells, found.parity
    kernels, losses, steps = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in FILES if name.endswith("jsonl")
    )
    where = {"overrides": {"model.dropout": "0.1"}, "mode": "eager", "arm": TORCH}
    assert steps[1] == where | {"block": 1, "turn": cell.arms[TORCH].positions[1], "ms": cell.arms[TORCH].blocks_ms[1]}
    assert len(steps) == sum(len(arm.blocks_ms) for arm in cell.arms.values())
    assert len(losses) == len(results.PARITY_ARMS) * 2 * parity.steps
    line = next(one for one in losses if (one["arm"], one["seed"], one["step"]) == (FUSED, parity.seeds[1], 3))
    for field, key in (("losses", "loss"), ("gradient_norms", "gradient_norm"), ("gradient_errors", "gradient_error")):
        assert line[key] == getattr(parity, field)[FUSED][1][3]
    assert "gradient_error" not in losses[0], "the reference is what errors are from"
    assert {(line["arm"], line["group"]) for line in kernels} == {(arm, group) for arm in (TORCH, FUSED) for group in GROUPS}
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["cells"][0]["arms"][TORCH].keys() >= {"step_ms", "block_steps"} and "positions" not in str(kept)
    assert not {"blocks_ms", *records.PARITY_FIELDS} & {*kept["cells"][0]["arms"][TORCH], *kept["parity"][0]}
    assert kept["parity"][0]["distances"]["loss"][0] == dataclasses.asdict(parity.distances["loss"][0])
