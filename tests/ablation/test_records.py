"""An ablation on disk."""

import dataclasses
import json

from ablation import records
from measure.attribution import GROUPS
from measure.comparison import FUSED, TORCH
from tests.ablation import results

FILES = ["kernels.jsonl", "parity.jsonl", "steps.jsonl"]


def test_raw_files_have_a_line_for_each_block_step_or_kernel_and_the_report_has_none_of_them(tmp_path):
    found = results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager"], seeds=2)
    (cell,), (parity,) = found.cells, found.parity
    parity.losses[FUSED][0][0] = float("inf")  # which JSON lacks
    records.save(found, tmp_path)
    kernels, losses, steps = ([json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in FILES)
    where = {"overrides": {"model.dropout": "0.1"}, "mode": "eager", "arm": TORCH}
    assert steps[1] == where | {"block": 1, "turn": cell.arms[TORCH].positions[1], "ms": cell.arms[TORCH].blocks_ms[1]}
    assert len(steps) == sum(len(arm.blocks_ms) for arm in cell.arms.values())
    assert len(losses) == len(results.PARITY_ARMS) * 2 * parity.steps
    line = next(one for one in losses if (one["arm"], one["seed"], one["step"]) == (FUSED, parity.seeds[1], 3))
    assert (line["loss"], line["gradient_norm"]) == (parity.losses[FUSED][1][3], parity.gradient_norms[FUSED][1][3])
    assert next(line["loss"] for line in losses if (line["arm"], line["seed"]) == (FUSED, 1)) == "Infinity"
    assert {(line["arm"], line["group"]) for line in kernels} == {
        (arm, group) for arm in (TORCH, "compiled", FUSED) for group in GROUPS
    }
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["cells"][0]["arms"][TORCH].keys() >= {"step_ms", "block_steps"} and "positions" not in str(kept)
    assert not {"blocks_ms", "losses", "gradient_norms"} & {*kept["cells"][0]["arms"][TORCH], *kept["parity"][0]}
    assert kept["parity"][0]["distances"]["loss"][0] == dataclasses.asdict(parity.distances["loss"][0])
