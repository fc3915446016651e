"""The verdict, and report.md: what its reader meets, and in which order."""

import dataclasses
import re
from itertools import product

import numpy as np
import pytest

from ablation import plots, report, turns
from ablation.compared import AGAIN, FUSED, TORCH, Comparison, Quantity
from ablation.statistics import Interval
from ablation.verdict import NO_KERNEL, differs, verdict_of
from tests.ablation import results

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


def test_the_order_of_blocks_is_said_as_it_is_made(tmp_path):
    words = " ".join(written(results.ablation(overrides=[{}], modes=["eager"]), tmp_path).split())
    assert "in its reverse; every third order is drawn by seed, and in between the first goes last." in words
    first, second, third, *_ = ([*order] for order in turns.schedule(6, seed=1))
    assert len(first) == 2 * 3 and first[3:] == first[2::-1]
    assert second[:3] == [*first[1:3], first[0]] and third[:3] == [*second[1:3], second[0]]


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
