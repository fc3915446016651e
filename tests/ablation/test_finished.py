"""The report of finished training runs, unpaired: groups, comparisons, and what is refused."""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from ablation import finished, serialize
from ablation.compared import FUSED, TORCH
from ablation.verdict import NO_KERNEL
from tests.ablation import results
from tests.runs import corpus, train_here


def finished_run(folder, impl="torch", seed=1, step_ms=100.0, loss=3.0, config="train:\n  steps: 10\n", gpu="NVIDIA H200"):
    """A folder as train.py leaves it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"norm:\n  impl: {impl}\nseed: {seed}\nlogging:\n  name: {folder.name}\n{config}")
    lines = [{"step": 5 * i, "train/loss": 3.0, "perf/step_ms": step_ms + i} for i in (-1, 0, 1)]
    lines = [line | {"perf/tokens_per_s": 32768.0, "perf/peak_gb": 18.64} for line in lines]
    lines.insert(0, {"step": 1, "train/loss": 3.0, "perf/step_ms": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"final": {"loss": loss, "bits_per_byte": 1.0}, "median_step_ms": step_ms}))
    environment = {
        "command": f"train.py seed={seed} norm.impl={impl}",
        "gpu": {"name": gpu} if gpu else None,
        "versions": {"torch": "2.11.0"},
        "git": None,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    return str(folder)


def test_finished_runs_are_grouped_and_compared_by_impl(tmp_path, capsys):
    for seed in (1, 2, 3):
        finished_run(tmp_path / f"torch{seed}", "torch", seed, 120.0 + seed, 3.0 + 0.1 * seed)
        finished_run(tmp_path / f"fused{seed}", "fused", seed, 100.0, 3.002 + 0.1 * seed)
    assert finished.main([str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    written = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    found, _, rest = written.partition("## Commands")
    assert text == f"{found.rstrip()}\n\nreport: {tmp_path / 'out'}/report.md\n"
    first, second, third = text.splitlines()[:3]
    assert "6 finished runs, unpaired: 1.220 × as fast (range 1.192 to 1.248)" in first and third.startswith(
        "Step times are unpaired"
    )
    difference = "fused − torch 0.00200 (0.00200 to 0.00200), mean and 95 % t-interval, paired over 3 seeds"
    assert second.startswith(f"Final validation loss: {difference}") and difference in " ".join(
        found.partition("## ")[2].split()
    )
    assert "- Steps of fused beside those of torch: 1.220 × as fast" in text, "not fused over torch, which would be 0.820"
    assert NO_KERNEL not in text
    row = next(line for line in text.splitlines() if line.startswith("| torch1"))
    assert [cell.strip() for cell in row.split("|")[4:-1]] == ["121.00", "120.20", "121.80", "32,768", "18.64", "3.10000"]
    for name in ("losses.png", "step_times.png"):
        assert f"]({name})" in text and (tmp_path / "out" / name).stat().st_size > 5000
    assert f"python -m ablation.report {tmp_path} --output" in rest and "python train.py seed=3 norm.impl=fused" in rest
    assert "NVIDIA H200" in rest and "steps: 10" in rest.partition("## Configuration of the first run")[2]


def test_losses_that_differ_in_one_direction_at_every_seed_are_called_different_and_others_not(tmp_path, capsys):
    for seed, apart in enumerate((0.01, 0.012, 0.011), start=1):
        for size, by in ((16, apart), (32, apart * (-1) ** seed)):
            config = f"train:\n  batch_size: {size}\n"
            finished_run(tmp_path / f"torch{size}_{seed}", "torch", seed, loss=3.0, config=config)
            finished_run(tmp_path / f"fused{size}_{seed}", "fused", seed, loss=3.0 + by, config=config)
    assert finished.main([str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].startswith("Final validation loss, in 2 groups: no difference found in 1, a difference in 1.")
    words = " ".join(text.split())
    assert "loss: fused − torch 0.01100" in words and "loss: no difference found, fused − torch −0.00300" in words


def test_runs_made_again_are_the_control_of_the_losses(tmp_path, capsys):
    """Fused is higher at every seed, by much the same; torch made again is as it was, or anywhere around it."""
    for seed, by in zip((1, 2, 3), (0.010, 0.011, 0.009), strict=True):
        finished_run(tmp_path / "a" / f"torch{seed}", "torch", seed, loss=3.0)
        finished_run(tmp_path / "a" / f"fused{seed}", "fused", seed, loss=3.0 + by)
        finished_run(tmp_path / "near" / f"torch{seed}", "torch", seed, loss=3.002 if seed == 2 else 3.0)
        finished_run(tmp_path / "far" / f"torch{seed}", "torch", seed, loss=3.03)
        finished_run(tmp_path / "far" / f"torch{seed}again", "torch", seed, loss=2.97)
    said = {}
    for name in ("near", "far"):
        folders = [str(tmp_path / "a"), str(tmp_path / name)]
        assert finished.main([*folders, "--output", str(tmp_path / "out")]) == 0
        said[name] = capsys.readouterr().out.splitlines()[1]
    # of 0.010, 0.010 and 0.009, and of 0, 0.002 and 0: Student's 97.5 % quantile of two degrees of freedom is 4.303
    assert "loss: fused − torch 0.00967 (0.00823 to 0.01110), mean" in said["near"]
    assert "; A/A, of 3 runs made again, 0.00067 (−0.00220 to 0.00354);" in said["near"]
    assert "loss: no difference found, fused − torch 0.01000 (0.00752 to 0.01248), mean" in said["far"]
    assert "; A/A, of 6 runs made again, 0.00000 (−0.03449 to 0.03449);" in said["far"]


def test_runs_of_other_configs_are_other_groups(tmp_path, capsys):
    for size, impl in product((16, 32), ("torch", "fused")):
        finished_run(tmp_path / f"{impl}{size}", impl, step_ms=float(size), config=f"train:\n  batch_size: {size}\n")
    assert finished.main([str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "## train.batch_size=16" in text and "## train.batch_size=32" in text and "+0.00000 (seed 1)" in text
    assert text.count("no difference found, 1.000 × as fast") == 4  # its range contains 1
    pictures = {"losses_0.png", "losses_1.png", "step_times.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.md", *pictures}
    assert "](losses_0.png)" in text and "](losses_1.png)" in text


def test_what_else_differs_between_runs_is_noted(tmp_path, capsys):
    folders = [finished_run(tmp_path / "a", "torch", gpu="NVIDIA A100"), finished_run(tmp_path / "b", "fused", gpu=None)]
    assert finished.main([*folders, "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "differ in gpu.name: NVIDIA A100" in text and NO_KERNEL in text and "norm.dropout_masks" not in text


@pytest.mark.parametrize(("masks", "said"), [("native", True), ("shared", False)])
def test_runs_whose_dropout_masks_differ_say_so(tmp_path, capsys, masks, said):
    config = "model:\n  dropout: 0.1\n"
    for impl in (TORCH, FUSED):
        finished_run(tmp_path / impl, impl, config=config)
        file = tmp_path / impl / "config.yaml"
        file.write_text(file.read_text().replace("norm:\n", f"norm:\n  dropout_masks: {masks}\n"))
    assert finished.main([str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert ("norm.dropout_masks=shared would" in " ".join(capsys.readouterr().out.split())) == said


@pytest.mark.parametrize("missing", ["torch", "fused"])
def test_an_impl_without_a_counterpart_is_an_error_that_names_it(tmp_path, capsys, missing):
    only = finished_run(tmp_path / "run", "fused" if missing == "torch" else "torch")
    assert finished.main([only, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no run") and f"norm.impl={missing}" in error and only in error
    assert not (tmp_path / "out").exists()


def test_keys_that_set_runs_apart_are_shown_as_one_types_them(tmp_path, capsys):
    a = finished_run(tmp_path / "a", "torch", config="eval:\n  batches: null\ntrain:\n  recompute: false\n")
    b = finished_run(tmp_path / "b", "fused", config="eval:\n  batches: 2\ntrain:\n  recompute: true\n")
    assert finished.main([a, b, "--output", str(tmp_path / "out")]) == 2
    assert "train.recompute=false, eval.batches=null" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ("profile: true\n", True),
        ("resume_with_changes: true\n", True),
        ("checkpoint:\n  every: 7\n  keep: 1\n", True),
        ("sample:\n  tokens: 0\n", True),
        ("eval:\n  every: 3\n", True),
        ("data:\n  processes: 2\n", True),
        ("checkpoint:\n  background: true\n", False),
        ("eval:\n  batches: 3\n", False),
        ("  project: mine\n", True),  # of logging, which the file has last
        ("  every: 1\n", False),
        ("deterministic: true\n", False),
    ],
)
def test_keys_that_change_neither_steps_nor_times_nor_losses_do_not_set_runs_apart(config, same, tmp_path):
    runs = [
        finished.read_run(Path(finished_run(tmp_path / "a", "torch"))),
        finished.read_run(Path(finished_run(tmp_path / "b", "fused", config=f"{config}train:\n  steps: 10\n"))),
    ]
    if same:
        assert finished.grouped(runs) == [({}, runs)]
    else:
        with pytest.raises(ValueError, match=r"no run with .* has norm\.impl="):
            finished.grouped(runs)


def test_runs_that_did_not_finish_are_named_and_left_out(tmp_path, capsys):
    for name, impl in (("torch", "torch"), ("fused", "fused"), ("stopped", "fused")):
        finished_run(tmp_path / name, impl)
    (tmp_path / "stopped" / "summary.json").unlink()
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")  # Hydra's, where the runs are a sweep's
    assert finished.main([*map(str, tmp_path.glob("*")), "--output", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"left out: {tmp_path}/stopped: no summary.json.") and len(err.splitlines()) == 1
    assert "from 2 finished runs" in out and "left out, being no finished runs: stopped." in " ".join(out.split())

    (tmp_path / "torch" / "summary.json").unlink()
    assert finished.main([str(tmp_path), "--output", str(tmp_path / "none")]) == 2
    assert "no run has norm.impl=torch" in capsys.readouterr().err
    (tmp_path / "fused" / "summary.json").unlink()
    assert finished.main([str(tmp_path), "--output", str(tmp_path / "none")]) == 2
    assert "error: no finished run is left to compare." in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_folders_that_are_no_finished_run_are_errors_that_name_them(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    unfinished = tmp_path / "unfinished"
    finished_run(unfinished)
    (unfinished / "summary.json").unlink()
    finished_run(tmp_path / "sweeps" / "a_sweep" / "0")
    torn = tmp_path / "torn"
    finished_run(torn)
    (torn / "environment.json").write_text("{")
    for folder, why in (
        (tmp_path / "nowhere", "is no folder"),
        (tmp_path / "empty", "no config.yaml"),
        (tmp_path / "sweeps", f"Give those: {tmp_path}/sweeps/*."),
        (unfinished, f"resume={unfinished}"),
        (torn, "not as train.py writes it"),
    ):
        assert finished.main([str(folder), "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert str(folder) in error and why in error and "Traceback" not in error


def test_report_of_runs_that_were_trained(tmp_path, capsys):
    overrides = [*corpus(tmp_path), "train.steps=10", "eval.every=0", "logging.every=2", "sample.tokens=0"]
    for impl in (TORCH, FUSED):
        train_here([*overrides, f"norm.impl={impl}"], tmp_path / impl)
    assert finished.main([str(tmp_path / TORCH), str(tmp_path / FUSED), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert NO_KERNEL in text
    difference = re.search(r"fused − torch ([+−][\d.]+) \(seed", text)
    assert difference and abs(float(difference[1].replace("−", "-"))) < 1e-3


def test_an_ablations_folder_is_told_to_have_its_report(tmp_path, capsys):
    folder = tmp_path / "now_ablation"
    serialize.save(results.ablation(overrides=[{}], modes=["eager"]), folder)
    (folder / "config.yaml").touch()
    assert finished.main([str(folder)]) == 2
    assert f"{folder}: an ablation, whose report is {folder}/report.md." in capsys.readouterr().err
