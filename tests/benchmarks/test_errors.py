"""The programs that measure errors, at toy size: what they record, and what they print."""

from benchmarks import parity_errors, study_errors


def test_drawn_studies_are_recorded_and_told_by_kind(recorded, monkeypatch):
    monkeypatch.setattr(study_errors, "KINDS", [study_errors.KINDS[0], study_errors.KINDS[-2]])
    file, printed = recorded(study_errors, "--studies", "4")
    one, searched = file["records"]
    assert (one["arms"], one["seeds"], searched["fails"]) == (1, 3, 0.3)
    assert all(0 <= of[name] <= 1 for of in (one, searched) for name in ("errors", "welch", "power"))
    assert all(f"{of['kind']}  " in printed for of in (one, searched)) and "power" in printed


def test_a_run_of_the_parity_test_is_drawn_of_the_seeds_and_correct_arms_hold(tiny, recorded):
    small = ["ablate.arms=[torch,fused]", "ablate.parity_seeds=2", "ablate.parity_steps=2"]
    file, printed = recorded(parity_errors, "--seeds", "3", *tiny, *small)
    assert [(one["arm"], one["fails"], one["seeds"]) for one in file["records"]] == [("fused", 0.0, 3), ("any arm", 0.0, 3)]
    assert "any arm: fails in 0.0% of runs" in printed
