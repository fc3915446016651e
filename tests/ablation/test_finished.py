"""The report of finished training runs, unpaired: groups, comparisons, and what is refused."""

import json

import pytest

from ablation import finished, plots, records
from ablation.finished import check_comparable, read_run
from measure.comparison import FUSED, NO_KERNEL, TORCH
from tests.ablation import results


def finished_run(folder, impl="torch", seed=1, step_ms=100.0, loss=3.0, config="train:\n  steps: 10\n", gpu="NVIDIA H200"):
    """A folder as train.py leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"norm:\n  impl: {impl}\nseed: {seed}\nlogging:\n  name: {folder.name}\n{config}")
    rates = {"perf/tokens_per_s": 32768.0, "perf/peak_gb": 18.64}
    times = [None, step_ms - 1, step_ms, step_ms + 1]
    lines = [{"step": step, "train/loss": 3.0, "val/loss": loss, "perf/step_ms": ms} | rates for step, ms in enumerate(times)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"final": {"loss": loss}}))
    facts = {"command": f"train.py seed={seed} norm.impl={impl}", "gpu": {"name": gpu} if gpu else None, "git": None}
    (folder / "environment.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def report(tmp_path, capsys):
    """A function: exit code, what it printed, and its errors, of the report on folders."""

    def report(*folders):
        code = finished.main([*map(str, folders), "--output", str(tmp_path / "out")])
        return code, *capsys.readouterr()

    return report


def test_finished_runs_are_grouped_and_compared_by_impl(tmp_path, report):
    for seed in (1, 2, 3):
        finished_run(tmp_path / f"torch{seed}", "torch", seed, 120.0 + seed, 3.0 + 0.1 * seed)
        finished_run(tmp_path / f"fused{seed}", "fused", seed, 100.0, 3.002 + 0.1 * seed)
    code, text, _ = report(*tmp_path.iterdir())
    found = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert code == 0 and text == f"{found}\nreport: {tmp_path / 'out'}/report.md\n" and NO_KERNEL not in text
    first, second, third = text.splitlines()[:3]
    assert first.endswith("from 6 finished runs") and third.startswith("Step times of runs are unpaired")
    difference = "fused − torch 0.00200 (0.00200 to 0.00200), mean and 95 % t-interval, paired over 3 seeds"
    assert second.startswith(f"Final validation loss: {difference}")
    row = next(line for line in text.splitlines() if line.startswith("| torch1"))
    assert [cell.strip() for cell in row.split("|")[4:-1]] == ["121.00", "32,768", "18.64", "3.10000"]
    assert "](losses.png)" in text and (tmp_path / "out" / "losses.png").stat().st_size > 5000
    assert "All runs: gpu.name NVIDIA H200." in text


def test_losses_that_differ_in_one_direction_at_every_seed_are_called_different_and_others_not(tmp_path, report):
    for seed, apart in enumerate((0.01, 0.012, 0.011), start=1):
        for folder, by in (("same", apart), ("mixed", apart * (-1) ** seed)):
            finished_run(tmp_path / folder / f"torch{seed}", "torch", seed, loss=3.0)
            finished_run(tmp_path / folder / f"fused{seed}", "fused", seed, loss=3.0 + by)
    same, mixed = (report(*(tmp_path / name).iterdir())[1].splitlines()[1] for name in ("same", "mixed"))
    assert "loss: fused − torch 0.01100" in same and "loss: no difference found, fused − torch −0.00300" in mixed


def test_runs_made_again_are_the_control_of_the_losses(tmp_path, report):
    """Fused is higher at every seed, by much the same; torch made again is as it was, or anywhere around it."""
    for seed, by in zip((1, 2, 3), (0.010, 0.011, 0.009), strict=True):
        finished_run(tmp_path / "a" / f"torch{seed}", "torch", seed, loss=3.0)
        finished_run(tmp_path / "a" / f"fused{seed}", "fused", seed, loss=3.0 + by)
        finished_run(tmp_path / "near" / f"torch{seed}", "torch", seed, loss=3.002 if seed == 2 else 3.0)
        finished_run(tmp_path / "far" / f"torch{seed}", "torch", seed, loss=3.03)
        finished_run(tmp_path / "far" / f"torch{seed}again", "torch", seed, loss=2.97)
    near, far = (
        report(*(tmp_path / "a").iterdir(), *(tmp_path / name).iterdir())[1].splitlines()[1] for name in ("near", "far")
    )
    # of 0.010, 0.010 and 0.009, and of 0, 0.002 and 0: Student's 97.5 % quantile of two degrees of freedom is 4.303
    assert "loss: fused − torch 0.00967 (0.00823 to 0.01110), mean" in near
    assert "; A/A, of 3 runs made again, 0.00067 (−0.00220 to 0.00354);" in near
    assert "loss: no difference found, fused − torch 0.01000 (0.00752 to 0.01248), mean" in far
    assert "; A/A, of 6 runs made again, 0.00000 (−0.03449 to 0.03449);" in far


@pytest.mark.parametrize("masks", ["native", "shared"])
def test_what_else_could_explain_a_difference_is_noted(tmp_path, report, masks):
    for impl, gpu in ((TORCH, "NVIDIA A100"), (FUSED, None)):
        file = finished_run(tmp_path / impl, impl, config="model:\n  dropout: 0.1\n", gpu=gpu) / "config.yaml"
        file.write_text(file.read_text().replace("norm:\n", f"norm:\n  dropout_masks: {masks}\n"))
    words = " ".join(report(*tmp_path.iterdir())[1].split())
    assert "differ in gpu.name: " in words and "NVIDIA A100" in words and NO_KERNEL in words and "+0.00000 (seed 1)" in words
    assert ("norm.dropout_masks=shared would" in words) == (masks == "native")


FREE = [
    *("profile: true\n", "resume_with_changes: true\n", "checkpoint:\n  every: 7\n  keep: 1\n", "sample:\n  tokens: 0\n"),
    *("eval:\n  every: 3\n", "data:\n  processes: 2\n", "  project: mine\n"),  # of logging, which the file has last
]
SETS_APART = ["checkpoint:\n  background: true\n", "eval:\n  batches: 3\n", "  every: 1\n", "deterministic: true\n"]


@pytest.mark.parametrize("config", FREE + SETS_APART)
def test_keys_that_change_neither_steps_nor_times_nor_losses_do_not_set_runs_apart(config, tmp_path):
    one = finished_run(tmp_path / "a", "torch")
    other = finished_run(tmp_path / "b", "fused", config=f"{config}train:\n  steps: 10\n")
    runs = [read_run(one), read_run(other)]
    if config in FREE:
        check_comparable(runs)
    else:
        with pytest.raises(ValueError, match=r"the runs differ in \w+\.?\w* \(.*Give those of one value"):
            check_comparable(runs)


def test_what_is_no_finished_run_is_named_with_the_reason_and_left_out(tmp_path, report):
    for name, impl in (("torch", "torch"), ("fused", "fused"), ("stopped", "fused"), ("torn", "torch")):
        finished_run(tmp_path / name, impl)
    (tmp_path / "stopped" / "summary.json").unlink()
    (tmp_path / "torn" / "environment.json").write_text("{")
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")  # Hydra's, where the runs are a sweep's
    (tmp_path / "a_note").mkdir()
    records.save(results.ablation(overrides=[{}], modes=["eager"]), tmp_path / "ablation")
    code, out, err = report(*sorted(tmp_path.iterdir()), tmp_path / "nowhere")
    reasons = ("metrics.jsonl", "an ablation, whose report is", "resume=", "not as train.py writes it", "metrics.jsonl")
    assert code == 0 and "from 2 finished runs" in out
    assert "left out, being no finished runs: a_note, ablation, stopped, torn, nowhere." in " ".join(out.split())
    for line, why in zip(err.splitlines(), reasons, strict=True):
        assert line.startswith("left out: ") and why in line
    for folders, error in ((["torch"], "no finished run has norm.impl=fused:"), (["a_note"], "has norm.impl=fused nor torch:")):
        code, _, err = report(*(tmp_path / name for name in folders))
        assert code == 2 and error in err


def test_the_picture_has_how_far_every_pair_and_every_run_made_again_are_apart(tmp_path, monkeypatch):
    """Of a seed whose run with torch was made again, and of one that has no run with torch."""
    figures = []
    monkeypatch.setattr(plots, "finish", lambda figure, *_: figures.append(figure))
    one, two, three = ([(250, first), (500, last)] for first, last in ((2.0, 1.5), (2.5, 1.5), (2.5, 1.0)))
    plots.losses_apart([("torch", 1, one), ("fused", 1, two), ("torch", 1, three), ("fused", 2, [])], tmp_path)
    apart, again, mean = (list(line.get_ydata()) for line in figures[0].axes[0].lines[:3])
    assert (apart, again, mean) == ([0.25, 0.25], [0.5, -0.5], [0.25, 0.25]), "fused from the mean of torch's runs"
