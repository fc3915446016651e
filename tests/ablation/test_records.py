"""An ablation on disk."""

import dataclasses
import json

from ablation import records
from measure.attribution import GROUPS
from measure.comparison import FUSED, TORCH
from tests.ablation import results


def test_kernels_have_a_file_of_a_line_each_and_the_report_has_the_spread_of_the_steps(tmp_path):
    found = results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager"])
    (cell,), (parity,) = found.cells, found.parity
    cell.arms[TORCH].blocks_ms[0] = [float("inf")] * 20  # which JSON lacks
    records.save(found, tmp_path)
    kernels = list(map(json.loads, (tmp_path / "kernels.jsonl").open()))
    assert all((line["overrides"], line["mode"]) == ({"model.dropout": "0.1"}, "eager") for line in kernels)
    wanted = {(arm, group) for arm in (TORCH, "compiled", FUSED) for group in GROUPS}
    assert {(line["arm"], line["group"]) for line in kernels} == wanted
    kept = json.loads((tmp_path / "report.json").read_text())
    arm = kept["cells"][0]["arms"][TORCH]
    assert arm.keys() >= {"step_ms", "block_steps"} and "blocks_ms" not in arm
    assert kept["parity"][0]["distances"]["loss"][0] == dataclasses.asdict(parity.distances["loss"][0])
