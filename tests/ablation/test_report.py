import dataclasses
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot

from ablation import finished, plots, report, serialize
from ablation.compared import AGAIN, FUSED, TORCH, Comparison, Quantity
from ablation.statistics import Interval
from ablation.verdict import NO_KERNEL, differs, verdict_of
from tests.ablation import results
from tests.runs import corpus, train_here
from training.attribution import GROUPS, Share

# ---- verdict ---------------------------------------------------------------------------------------------------------------


def comparison(low: float, median: float, high: float) -> Comparison:
    return Comparison(Interval(0.0, 0.0, 0.0), Interval(median, low, high))


CONTROL = comparison(0.998, 1.000, 1.002)


@pytest.mark.parametrize(
    ("fused", "control", "said"),
    [
        (comparison(1.19, 1.20, 1.21), CONTROL, r"^fused norms 1.200 × \(95 % 1.190 to 1.210\) as fast as PyTorch's; A/A"),
        (comparison(0.94, 0.95, 0.96), CONTROL, "^fused norms 0.950 × .* as fast as PyTorch's, that is slower; A/A"),
        (comparison(0.99, 1.05, 1.11), CONTROL, "no difference found: fused norms 1.050 × .*, and its interval contains 1"),
        (comparison(1.00, 1.05, 1.11), CONTROL, "no difference found"),
        (comparison(1.0005, 1.0015, 1.003), CONTROL, "no difference found: .*, and A/A shows as much"),
        (comparison(0.997, 0.9985, 0.9995), CONTROL, "no difference found: .*, and A/A shows as much"),
        (comparison(1.01, 1.02, 1.03), comparison(0.97, 0.98, 0.99), "no difference found: .*, and A/A shows as much"),
        (comparison(1.01, 1.02, 1.03), comparison(1.01, 1.02, 1.03), "no difference found: .*, and A/A shows as much"),
        (comparison(*[float("nan")] * 3), CONTROL, "no verdict"),
        (comparison(1.19, 1.20, 1.21), comparison(*[float("nan")] * 3), "no difference found"),
    ],
)
def test_a_speedup_is_claimed_only_beyond_chance_and_beyond_the_control(fused, control, said):
    assert re.search(said, verdict_of(fused, control))
    assert differs(fused, control) == said.startswith("^fused norms")


@pytest.mark.parametrize(("low", "high", "off"), [(0.991, 0.998, True), (0.991, 1.001, False), (1.002, 1.005, True)])
def test_a_control_whose_interval_leaves_out_its_truth_is_told_of(low, high, off):
    apart = Interval(0.0, -1.0, 1.0)
    fused, control = Comparison(apart, Interval(1.15, 1.14, 1.16)), Comparison(apart, Interval((low + high) / 2, low, high))
    assert ("leaves out 1: intervals here may be too narrow" in verdict_of(fused, control)) == off


def test_a_gain_beyond_the_bound_is_named_as_one(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"])
    cell = found.cells[0]
    said = []
    for bound in (cell.fused.speedup.low - 0.01, cell.fused.speedup.median):
        of = dataclasses.replace(cell, attribution=dataclasses.replace(cell.attribution, bound=bound))
        text = written(dataclasses.replace(found, cells=[of]), tmp_path)
        said.append("which is more: part of what" in " ".join(text.split()))
    assert said == [True, False]


@pytest.mark.parametrize(("watts", "limited"), [(560.0, False), (693.9, True)])
def test_clocks_and_power_are_told_of_each_arm_and_what_a_power_limit_means(tmp_path, watts, limited):
    found = results.ablation(overrides=[{}], modes=["eager"])
    torch = [results.gpu_state(1710, 560.0), results.gpu_state(1695, 690.0)]
    fused = [results.gpu_state(1650, watts), results.gpu_state(1635, 694.0)]
    of = dataclasses.replace(found.cells[0], gpu={TORCH: torch, FUSED: fused})
    report = written(dataclasses.replace(found, cells=[of]), tmp_path)
    text = " ".join(report.split())
    assert (
        "Read twice while it took steps, the GPU was at 1710 and 1695 of 1980 MHz and 560 and 690 of 700 W under torch" in text
    )
    assert f"1650 and 1635 of 1980 MHz and {watts:.0f} and 694 of 700 W under fused" in text
    assert ("Under fused that is its power limit" in text) == limited and "Under torch" not in text, "one reading is below it"
    table = [line for line in report.partition("## Environment")[2].splitlines() if line.startswith("| eager")]
    assert [line.split("|")[2].strip() for line in table] == ["torch", "torch", "fused", "fused"] and "1635 of 1980" in table[3]


@pytest.mark.parametrize("state", [{}, {"clocks.sm": "1710 MHz"}, results.gpu_state(1710, 1) | {"power.draw": "[N/A]"}])
def test_a_gpu_that_does_not_tell_is_not_told_of(tmp_path, state):
    found = results.ablation(overrides=[{}], modes=["eager"])
    of = dataclasses.replace(found.cells[0], gpu={TORCH: [state], FUSED: [state]})
    assert "the GPU was at" not in " ".join(written(dataclasses.replace(found, cells=[of]), tmp_path).split())


# ---- files -----------------------------------------------------------------------------------------------------------------


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


# ---- report.md -------------------------------------------------------------------------------------------------------------


def written(found, folder) -> str:
    """The report; without its pictures, which would take longer than the rest of a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step_times", "speedups", "attributions", "losses"):
            patch.setattr(plots, name, lambda *_: True)
        return report.write(found, folder).read_text(encoding="utf-8")


def test_first_three_lines_are_the_verdict(tmp_path):
    found = results.ablation(overrides=[{}])
    first, timing, parity = written(found, tmp_path).splitlines()[:3]
    assert re.search(r"1\.200 × as fast eager, 1\.0\d\d × compiled; parity holds", first)
    assert all(cell.verdict in timing for cell in found.cells) and "A/A" in timing
    assert parity.startswith("Parity holds: ")


def test_of_a_sweep_that_was_stopped_the_one_parity_says_whose_it_is(tmp_path):
    found = results.ablation(overrides=[{"norm.kind": "rmsnorm"}])
    stopped = dataclasses.replace(found, unfinished="2 of 8 parts")
    assert written(stopped, tmp_path).splitlines()[2].startswith("norm.kind=rmsnorm: parity holds: ")


def test_report_has_every_section_and_its_pictures(tmp_path):
    text = report.write(results.ablation(), tmp_path).read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert titles == [
        "What was measured", "Step times", "Fused against torch", "Forward, backward, optimizer",
        "What torch.compile buys, and what is left", "Where the GPU time goes", "Parity",
        "Plots", "Environment", "Command", "Configuration",
    ]  # fmt: skip
    pictures = re.findall(r"\]\((\S+)\)", text)
    assert pictures == ["step_times.png", "speedup.png", "attribution.png", "parity_0.png", "parity_1.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    assert "NVIDIA H200" in text and re.search(r"git\.dirty +yes", text) and "power_limit_w  700.0" in text


def test_without_kernels_the_first_line_says_so(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"], kernels=False)
    text = written(found, tmp_path)
    assert text.startswith(f"# {NO_KERNEL}\n") and report.table(found).startswith(NO_KERNEL)
    assert "Where the GPU time goes" not in text and "torch.compile" not in text
    assert NO_KERNEL not in written(results.ablation(overrides=[{}], modes=["eager"]), tmp_path)


def test_no_difference_and_broken_parity_are_in_the_first_line(tmp_path):
    found = results.ablation(speedups={"compiled": 1.0}, parity=False)
    text = written(found, tmp_path)
    assert "no difference found compiled; parity FAILS" in text.splitlines()[0]
    assert "What is left for fused norms after it: no difference found." in " ".join(text.split())


def test_compile_alone_is_torch_eager_over_torch_compiled(tmp_path):
    text = written(results.ablation(overrides=[{}]), tmp_path)
    row = next(line for line in text.splitlines() if line.startswith("| this configuration"))
    alone, after, both = (float(cell.split()[0]) for cell in row.split("|")[2:-1])
    assert alone == pytest.approx(131.7 / 104.2, rel=0.01) and both == pytest.approx(alone * after, rel=0.01)


def test_an_unpaired_interval_covers_the_truth_where_both_blocks_of_a_cycle_were_slow_together():
    """Arms of 10 cycles, whose two blocks have 0.9 of their variance in common."""
    draw, missed = np.random.default_rng(0), 0
    for _ in range(400):
        pair = []
        for _ in range(2):
            cycles = 0.9**0.5 * draw.normal(size=(10, 1)) + 0.1**0.5 * draw.normal(size=(10, 2))
            blocks = [[10 * (1 + 0.01 * block)] for block in cycles.ravel()]
            pair.append(dataclasses.replace(results.cell({}).arms[TORCH], blocks_ms=blocks))
        missed += not report._unpaired_ratio(*pair).holds(1)
    assert missed <= 32  # 8 %; drawing blocks as if they were independent misses 12


def test_what_was_measured_and_on_what_stands_before_the_first_figure(tmp_path):
    found = results.ablation()
    found.environment["minutes"] = 4.2
    setting = " ".join(written(found, tmp_path).partition("## Step times")[0].partition("## What was measured")[2].split())
    assert setting == "- A note. - NVIDIA H200, torch 2.11.0, triton 3.6.0. The ablation has taken 4.2 minutes."


def test_the_tables_of_parity_begin_with_what_failed_and_then_what_came_nearest_to_it(tmp_path):
    far = [("c", 1.0, 1.0), ("a", 0.6, 0.4), ("b", 1.1, 1.0), ("broken", 0.5, 0.6), *((f"x{i}", 0.9, 1.0) for i in range(9))]
    quantities = [Quantity(n, Interval(f, f, f), Interval(r, r, r), n != "broken") for n, f, r in far]
    found = results.ablation(overrides=[{}], modes=["eager"])
    found = dataclasses.replace(found, parity=[dataclasses.replace(found.parity[0], quantities=quantities)])
    table = written(found, tmp_path).partition("| distance from reference")[2].partition("\n\n")
    assert [row.split()[1] for row in table[0].splitlines()[2:6]] == ["broken", "a", "b", "c"]
    said = "The first 10 of 13: what failed, then by fused over reordered. report.json has all."
    assert table[2].startswith(said)


def test_the_order_of_a_whole_table_of_parity_is_said(tmp_path):
    text = written(results.ablation(overrides=[{}], modes=["eager"]), tmp_path)
    parity = text.partition("| distance from reference")[2]
    assert "In order: what failed, then by fused over reordered." in parity
    assert "In order: what failed, then by the size of fused." in parity.partition("| shift in one direction")[2]


def test_figures_that_are_paired_are_said_to_be_beside_the_medians(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"])
    words = " ".join(written(found, tmp_path).partition("## Fused against torch")[2].split())
    assert "paired: medians over cycles of each cycle's difference and ratio. They need not agree with the medians" in words
    assert "times as fast is paired" in report.table(found)
    assert "paired" not in report.table(dataclasses.replace(found, cells=[]))


def test_profiled_time_stands_beside_the_timed_step(tmp_path):
    found = results.ablation(overrides=[{}], modes=["eager"])
    row = next(line for line in written(found, tmp_path).splitlines() if line.startswith("| a timed step"))
    timed = [float(cell) for cell in row.split("|")[2:-1] if cell.strip()]
    assert timed == pytest.approx([131.7, 131.7 / 1.2], rel=0.02)


def test_bound_of_norms_is_in_bytes_over_copy_bandwidth(tmp_path):
    text = " ".join(written(results.ablation(overrides=[{}], modes=["eager"]), tmp_path).split())
    assert "must move 40.00 GB, which takes 9.756 ms at the 4,100 GB/s" in text
    assert "no norm kernel makes this step more than 1.250 ×" in text and "fused norms save 83 %" in text


def test_report_without_timing_or_without_parity(tmp_path):
    found = results.ablation(overrides=[{}])
    assert "parity was not measured" in written(dataclasses.replace(found, parity=[]), tmp_path).splitlines()[0]
    text = written(dataclasses.replace(found, cells=[]), tmp_path)
    assert "not measured" in text.splitlines()[1] and "## Step times" not in text


def test_tables_fit_a_terminal(tmp_path):
    swept = [{"norm.kind": kind, "model.dropout": p} for kind, p in product(("layernorm", "rmsnorm"), ("0.0", "0.1"))]
    found = results.ablation(overrides=swept)
    lines = written(found, tmp_path).splitlines()[3:]
    assert max(len(line) for line in lines if not line.startswith("![")) <= 128
    assert max(len(line) for line in report.table(found).splitlines() if not line.startswith(("eager", "compiled"))) <= 128


def test_table_for_the_terminal_has_arms_control_and_verdict():
    found = results.ablation(overrides=[{}], modes=["eager"])
    text = report.table(found)
    for words in (TORCH, f"{AGAIN} (A/A)", FUSED, "tokens/s", "1.200 (", found.cells[0].verdict, "Parity holds"):
        assert words in text


def test_losses_that_end_in_nan_or_are_all_the_same_are_drawn(tmp_path):
    parity = results.parity_of({})
    first = next(iter(parity.losses.values()))
    for runs in (first, [[float("nan")] * parity.steps] * len(parity.seeds)):
        same = dataclasses.replace(parity, losses=dict.fromkeys(parity.losses, first) | {results.PARITY_ARMS[2]: runs})
        plots.losses(same, tmp_path / "parity.png")
        assert (tmp_path / "parity.png").stat().st_size > 5000


def test_the_norms_have_their_time_in_the_picture_where_they_are_a_twentieth_of_a_step(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append(figure))
    cell = results.ablation(overrides=[{}], modes=["eager"]).cells[0]
    torch, fused = ([Share("norm", norm, 75), Share("GEMM", 61.0, 195)] for norm in (17.5, 4.0))
    cell = dataclasses.replace(cell, attribution=dataclasses.replace(cell.attribution, torch=torch, fused=fused))
    assert plots.attributions([cell], tmp_path / "x.png")
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["17.5", "61.0", "78.5 ms", "4.00", "61.0", "65.0 ms"]


@pytest.mark.parametrize("most", [3e-7, 3e-3], ids=["within a decade", "over four"])
def test_the_axis_of_distances_from_the_reference_has_labels_to_read_a_scale_from(tmp_path, monkeypatch, most):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append(figure))
    parity = results.parity_of({}, seeds=1, steps=4)
    exact, *others = parity.losses
    off = {name: [[7.0, 7.0 + most, 7.0, 7.0 + 1.2e-7]] for name in others}
    plots.losses(dataclasses.replace(parity, losses={exact: [[7.0] * 4], **off}), tmp_path / "x.png")
    below = figures[0].axes[1]
    low, high = below.get_ylim()
    assert low == 0 and most < high and sum(0 < at <= high for at in below.get_yticks()) >= 2


# ---- finished training runs ------------------------------------------------------------------------------------------------


def test_the_picture_of_finished_runs_has_every_run_and_every_final_loss(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append((figure, title)))
    curve, other = [(250, 2.0), (500, 1.5)], [(250, 2.25), (500, 1.25)]
    runs = [("torch", 1, curve, 1.4), ("fused", 1, other, 1.3), ("fused", 2, [], 1.2)]
    plots.trained(runs, "here", tmp_path / "x.png")
    ((figure, title),) = figures
    above, between, below = figure.axes
    drawn = [[list(line.get_xdata()), list(line.get_ydata())] for line in above.lines]
    assert drawn == [[[250, 500], [2.0, 1.5]], [[250, 500], [2.25, 1.25]], [[], []]] and "here" in title
    seed, mean, _ = between.lines  # of the one seed that has both
    assert [list(line.get_ydata()) for line in (seed, mean)] == [[0.25, -0.25]] * 2
    assert [list(line.get_xdata()) for line in below.lines[::2]] == [[1.4], [1.3, 1.2]]
    assert [text.get_text() for text in below.texts] == ["1", "1", "2"]


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
