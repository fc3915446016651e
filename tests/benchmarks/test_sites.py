"""python -m benchmarks.sites, tried on the CPU."""

from benchmarks import sites
from benchmarks.cases import SITES


def test_records_have_shares_and_ratios_for_each_case_and_direction(recorded):
    file, printed = recorded(sites, "--device", "cpu", "--width", "64", "--provider", "ours", "torch", "--rounds", "1")
    records = file["records"]
    assert [r for r in records if r.get("error")] == []
    assert {(r["case"], r["direction"], r["residual_dtype"]) for r in records} == {
        (case, direction, stream) for case in SITES for direction in ("forward", "backward") for stream in ("bf16", "fp32")
    }
    assert all(r["share"] > 0 for r in records)
    assert "norm+add+norm, fp32 stream, fp32 weights, backward 64×64" in printed


def test_random_widths_depend_on_the_seed_alone():
    first, again, other = (sites.options_of(["--random", "4", "--seed", seed])[1].width for seed in ("1", "1", "2"))
    assert first == again != other and all(640 <= width <= 5376 and width % 64 == 0 for width in first)
