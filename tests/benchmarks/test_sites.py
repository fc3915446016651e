"""The benchmark of sites with a norm of the branch, tried on the CPU."""

import json

import pytest
import torch

from benchmarks import sites
from benchmarks.cases import WrongResult
from benchmarks.sites import CASES

BF16, FP32 = torch.bfloat16, torch.float32


def test_records_have_shares_and_ratios_for_each_case_and_direction(tmp_path, capsys):
    given = ["--device", "cpu", "--width", "64", "--provider", "ours", "torch", "--rounds", "1"]
    sites.main([*given, "--output", str(tmp_path)])
    records = json.loads((tmp_path / "sites.json").read_text())["records"]
    assert [r for r in records if r.get("error")] == []
    assert {(r["case"], r["direction"], r["residual_dtype"]) for r in records} == {
        (case, direction, stream) for case in CASES for direction in ("forward", "backward") for stream in ("bf16", "fp32")
    }
    assert all(r["share"] > 0 for r in records)
    assert "norm+add+norm, fp32 stream, fp32 weights, backward 64×64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "stream", "forward", "backward"),
    [
        ("norm_add_norm", BF16, 8, 12), ("norm_add_norm", FP32, 12, 18), ("norm_add", BF16, 6, 8), ("norm_add", FP32, 12, 14),
        ("add_dyt", BF16, 8, 8), ("add_dyt", FP32, 12, 16),
    ],
)  # fmt: skip
def test_minimum_bytes_are_those_of_a_count_by_hand(case, stream, forward, backward):
    assert [sites.minimum_bytes(CASES[case], way, 10, 64, stream) // 640 for way in ("forward", "backward")] == [
        forward,
        backward,
    ]


def test_a_wrong_result_is_found():
    (inputs,) = sites.make_inputs(CASES["norm_add_norm"], 8, 64, FP32, FP32, 1, torch.device("cpu"))
    right = sites.ours(CASES["norm_add_norm"])
    sites.check(CASES["norm_add_norm"], inputs, right)
    with pytest.raises(WrongResult):
        sites.check(CASES["norm_add_norm"], inputs, lambda i: tuple(1.1 * t for t in right(i)))
