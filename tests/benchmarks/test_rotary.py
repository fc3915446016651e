import json

import pytest
import torch

from benchmarks import rotary
from benchmarks.cases import WrongResult
from benchmarks.rotary import NORMS, Shape

CPU = torch.device("cpu")
SHAPE = Shape(3, 1, 16)


def test_records_have_shares_and_ratios_for_each_direction(tmp_path, capsys):
    rotary.main(
        ["--device", "cpu", "--heads", "3/1x16", "--provider", "ours", "torch", "--rounds", "6", "--output", str(tmp_path)]
    )
    records = json.loads((tmp_path / "rotary.json").read_text())["records"]
    assert {(r["case"], r["direction"], r["provider"]) for r in records} == {
        (case, direction, name)
        for case in ("rotary", "rms_rotary")
        for direction in ("forward", "backward")
        for name in ("ours", "torch")
    }
    assert all(r["share"] > 0 and (r["heads"], r["kv_heads"], r["D"], r["M"]) == (*SHAPE, 64) for r in records)
    assert all(("times_ours" in r) == (r["provider"] != "ours") for r in records)
    assert "RMS+rotary, backward 64×3/1 × 16" in capsys.readouterr().out


def test_minimum_bytes_are_those_of_a_count_by_hand():
    # 4 heads of q and k with 16 features of 2 bytes: x and y; dq, dk, q and k, dx; and dv of one head, read and written
    assert rotary.minimum_bytes("rms_rotary", "forward", SHAPE, 10) == 10 * 64 * 4
    assert rotary.minimum_bytes("rms_rotary", "backward", SHAPE, 10) == 10 * (64 * 6 + 16 * 4)
    assert rotary.minimum_bytes("rotary", "backward", SHAPE, 10) == 10 * (64 * 4 + 16 * 4)


@pytest.mark.parametrize("case", NORMS)
def test_a_wrong_result_is_found(case):
    (inputs,) = rotary.make_inputs(case, SHAPE, 64, 1, CPU)
    right = rotary.ours(case, SHAPE)
    rotary.check(case, SHAPE, True, inputs, right)

    def without_turn(i):
        q, _, v = right(i)
        return q, i.qkv.unflatten(-1, (-1, 16))[..., 3:4, :], v

    with pytest.raises(WrongResult, match="k is off"):
        rotary.check(case, SHAPE, False, inputs, without_turn)
    with pytest.raises(WrongResult, match="gradient of qkv is off"):
        rotary.check(
            case,
            SHAPE,
            True,
            inputs,
            lambda i: tuple(t.detach() + 0 * sum(leaf.sum() for leaf in i.leaves) for t in right(i)),
        )


def test_shapes_come_from_their_text_or_a_seed():
    assert rotary.shape_of("32/8x128") == Shape(32, 8, 128)
    for text in ("32x128", "8/4x15", "0/1x16"):
        with pytest.raises(Exception, match="is not like 32/8x128"):
            rotary.shape_of(text)
    assert rotary.random_shapes(1, 5) == rotary.random_shapes(1, 9)[:5] != rotary.random_shapes(2, 5)
