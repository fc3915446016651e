"""An ablation on disk."""

import dataclasses
import json

from ablation import records
from measure.attribution import GROUPS
from measure.comparison import FUSED, TORCH
from tests.ablation import results


def test_raw_files_have_a_line_for_each_block_or_kernel_and_the_report_has_none_of_them(tmp_path):
    found = results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager"])
    (cell,), (parity,) = found.cells, found.parity
    cell.arms[TORCH].blocks_ms[0][0] = float("inf")  # which JSON lacks
    records.save(found, tmp_path)
    kernels, steps = (list(map(json.loads, (tmp_path / f"{name}.jsonl").open())) for name in ("kernels", "steps"))
    where = {"overrides": {"model.dropout": "0.1"}, "mode": "eager", "arm": TORCH}
    assert steps[1] == where | {"block": 1, "turn": cell.arms[TORCH].positions[1], "ms": cell.arms[TORCH].blocks_ms[1]}
    assert len(steps) == sum(len(arm.blocks_ms) for arm in cell.arms.values())
    wanted = {(arm, group) for arm in (TORCH, "compiled", FUSED) for group in GROUPS}
    assert {(line["arm"], line["group"]) for line in kernels} == wanted
    kept = json.loads((tmp_path / "report.json").read_text())
    arm = kept["cells"][0]["arms"][TORCH]
    assert arm.keys() >= {"step_ms", "block_steps"} and not {"blocks_ms", "positions"} & arm.keys()
    assert kept["parity"][0]["distances"]["loss"][0] == dataclasses.asdict(parity.distances["loss"][0])
    assert steps[0]["ms"][0] is None
