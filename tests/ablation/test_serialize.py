"""An ablation on disk: what is saved is what is loaded, and what is torn or older."""

import dataclasses
import json
import re

import pytest
from matplotlib import pyplot

from ablation import plots, serialize
from ablation.compared import FUSED, TORCH
from tests.ablation import results
from training.attribution import GROUPS


@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_saved_is_what_is_loaded(tmp_path, kernels):
    found = results.ablation(kernels=kernels)
    serialize.save(found, tmp_path)
    assert serialize.load(tmp_path) == found
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "kernels.jsonl", "parity.jsonl", "report.json", "steps.jsonl",
    ]  # fmt: skip


def test_raw_files_have_a_line_for_each_step(tmp_path):
    found = results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager"], seeds=2)
    serialize.save(found, tmp_path)
    steps, losses = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()] for name in ("steps.jsonl", "parity.jsonl")
    )
    block = found.cells[0].arms[TORCH].blocks_ms[0]
    assert steps[1] == {
        "overrides": {"model.dropout": "0.1"}, "mode": "eager", "arm": TORCH, "block": 0, "turn": 0, "step": 1, "ms": block[1],
    }  # fmt: skip
    assert len(steps) == sum(len(block) for arm in found.cells[0].arms.values() for block in arm.blocks_ms)
    assert len(losses) == len(results.PARITY_ARMS) * 2 * found.parity[0].steps
    parity, fused = found.parity[0], results.PARITY_ARMS[2]
    line = next(one for one in losses if (one["arm"], one["seed"], one["step"]) == (fused, parity.seeds[1], 3))
    assert line["loss"] == parity.losses[fused][1][3] and line["gradient_norm"] == parity.gradient_norms[fused][1][3]
    assert line["gradient_error"] == parity.gradient_errors[fused][1][3]
    assert "gradient_error" not in losses[0], "the reference is what errors are from"
    kernels = [json.loads(line) for line in (tmp_path / "kernels.jsonl").read_text().splitlines()]
    assert {(line["arm"], line["group"]) for line in kernels} == {(arm, group) for arm in (TORCH, FUSED) for group in GROUPS}
    kept = json.loads((tmp_path / "report.json").read_text())
    assert "blocks_ms" not in kept["cells"][0]["arms"][TORCH]
    assert not {"losses", "gradient_norms", "gradient_errors"} & kept["parity"][0].keys()
    assert kept["parity"][0]["distances"]["loss"][0] == dataclasses.asdict(parity.distances["loss"][0])


def test_a_record_of_before_gradients_were_kept_is_still_read(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"])
    old = dataclasses.replace(found.parity[0], gradient_norms={}, gradient_errors={}, distances={})
    serialize.save(dataclasses.replace(found, parity=[old]), tmp_path)
    kept = json.loads((tmp_path / "report.json").read_text())
    del kept["parity"][0]["distances"]  # gradients have been in parity.jsonl alone, and now are not
    (tmp_path / "report.json").write_text(json.dumps(kept))
    assert serialize.load(tmp_path).parity == [old]
    sizes = []
    for at, parity in enumerate((old, found.parity[0])):
        plots.losses(parity, tmp_path / f"{at}.png")
        sizes.append(pyplot.imread(tmp_path / f"{at}.png").shape[0])
    assert sizes[1] == pytest.approx(1.5 * sizes[0], rel=0.02), "two panels, and three"


def test_a_record_of_before_turns_were_kept_is_still_read(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"])
    serialize.save(found, tmp_path)
    steps = tmp_path / "steps.jsonl"
    turn = re.compile(r'"turn": \d+, ')
    steps.write_text(turn.sub("", steps.read_text()))
    loaded = serialize.load(tmp_path)
    arms, before = loaded.cells[0].arms, found.cells[0].arms
    assert {name: arm.blocks_ms for name, arm in arms.items()} == {name: arm.blocks_ms for name, arm in before.items()}
    assert all(arm.turns is None for arm in arms.values())
    serialize.save(loaded, tmp_path)
    assert "turn" not in steps.read_text() and serialize.load(tmp_path) == loaded


def test_a_line_without_its_loss_is_refused(tmp_path):
    serialize.save(results.ablation(overrides=[{}], modes=["eager"]), tmp_path)
    kept = (tmp_path / "parity.jsonl").read_text().replace('"loss":', '"lost":', 1)
    (tmp_path / "parity.jsonl").write_text(kept)
    with pytest.raises(ValueError, match="not an ablation as this version writes it"):
        serialize.load(tmp_path)


def test_numbers_that_json_lacks_survive(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"])
    parity = found.parity[0]
    losses = parity.losses | {results.PARITY_ARMS[2]: [[float("inf")] * parity.steps] * len(parity.seeds)}
    found = dataclasses.replace(found, parity=[dataclasses.replace(parity, losses=losses)])
    serialize.save(found, tmp_path)
    assert serialize.load(tmp_path) == found


def test_a_torn_raw_file_is_refused(tmp_path):
    serialize.save(results.ablation(), tmp_path)
    steps = tmp_path / "steps.jsonl"
    whole = steps.read_text().splitlines(keepends=True)
    for torn in (whole[:-1], [*whole, whole[-1]]):
        steps.write_text("".join(torn))
        with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
            serialize.load(tmp_path)
