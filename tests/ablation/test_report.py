"""report.md: what its reader meets, in which order, and what its pictures show."""

import dataclasses
import re
from itertools import product

import pytest

from ablation import plots, report
from measure.comparison import AGAIN, FUSED, NO_KERNEL, TORCH
from measure.plots import ARMS
from tests.ablation import results


def written(found, folder) -> str:
    """The report; without its pictures, which would take longer than the rest of a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step_times", "lead", "attributions", "parity"):
            patch.setattr(plots, name, lambda *_: True)
        return report.write(found, folder).read_text(encoding="utf-8")


def words(text) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def one():
    return results.ablation(overrides=[{}], modes=["eager"])


def with_cell(found, **changed):
    return dataclasses.replace(found, cells=[dataclasses.replace(found.cells[0], **changed)])


def row(text, start):
    return [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith(start)).split("|")[2:-1]]


def test_report_has_every_section_and_its_pictures(tmp_path):
    text = report.write(results.ablation(), tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == [
        "What was measured", "Every pair", "What torch.compile buys, and what is left", "What the swept keys cost",
        "Where the time goes", "Parity", "More plots", "Step times", "Environment", "Command", "Configuration",
    ]  # fmt: skip
    pictures = re.findall(r"\]\((\S+)\)", text)
    assert pictures == ["speedup.png", "attribution.png", "parity.png", "step_times.png"]
    assert text.index("attribution.png") < text.index("## What was measured"), "verdict and two pictures come first"
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    assert "NVIDIA H200" in text and re.search(r"git\.dirty +yes", text) and "power_limit_w  700.0" in text


def test_first_three_lines_are_the_verdict(tmp_path, one):
    found = results.ablation(overrides=[{}])
    text = written(found, tmp_path)
    first, timing, parity = text.splitlines()[:3]
    # against the fastest other arm, which in eager code is compiled sites
    assert re.search(
        r"1\.09\d × as fast eager \(against compiled\), 1\.0\d\d × compiled \(against torch\); parity holds", first
    )
    assert all(cell.verdict in timing for cell in found.cells) and "A/A" in timing and parity.startswith("Parity holds: ")
    alone, after, both = (float(cell.split()[0]) for cell in row(text, "| this configuration"))
    assert alone == pytest.approx(131.7 / 104.2, rel=0.01), "torch.compile alone is torch eager over torch compiled"
    assert both == pytest.approx(alone * after, rel=0.01)
    text = written(results.ablation(compiled=1.0, parity=False), tmp_path)
    assert "no difference found compiled (against torch); parity FAILS" in text.splitlines()[0]
    stopped = dataclasses.replace(results.ablation(overrides=[{"norm.kind": "rmsnorm"}]), unfinished="2 of 8 parts")
    first, _, parity, *_ = written(stopped, tmp_path).splitlines()
    assert "NOT FINISHED (2 of 8 parts)" in first and parity.startswith("norm.kind=rmsnorm, fused: parity holds: ")
    assert "parity was not measured" in written(dataclasses.replace(one, parity=[]), tmp_path).splitlines()[0]
    text = written(dataclasses.replace(one, cells=[]), tmp_path)
    assert "not measured" in text.splitlines()[1] and "## Step times" not in text


def test_without_kernels_the_first_line_says_so(tmp_path, one):
    found = results.ablation(overrides=[{}], modes=["eager"], kernels=False)
    text = written(found, tmp_path)
    assert text.startswith(f"# {NO_KERNEL}\n") and report.table(found).startswith(NO_KERNEL)
    assert "Where the GPU time goes" not in text and "torch.compile" not in text and NO_KERNEL not in written(one, tmp_path)


def test_gpu_time_stands_beside_the_timed_step_and_the_amdahl_limit_over_each_base(tmp_path, one):
    text = written(one, tmp_path)
    timed = [float(cell) for cell in row(text, "| a timed step") if cell]
    assert timed == pytest.approx([131.7, 131.7 / 1.1, 131.7 / 1.2], rel=0.02)
    idle = [float(cell) for cell in row(text, "| idle") if cell]
    assert idle == pytest.approx([0.05 * 131.7] * 3, rel=0.2)
    assert "must move 40.00 GB, which takes 9.756 ms at the 4,100 GB/s" in words(text)
    assert "no norm kernel makes this step more than 1.250 × as fast as with torch (fused saves 83 %" in words(text)
    assert "and 1.136 × as fast as with compiled" in words(text) and "which is more: part of what" not in words(text)
    limit = one.cells[0].against(TORCH).speedup.low - 0.01
    beyond = dataclasses.replace(one.cells[0].attribution, limits={TORCH: limit})
    assert "which is more: part of what" in words(written(with_cell(one, attribution=beyond), tmp_path))


@pytest.mark.parametrize(("watts", "limited"), [(560.0, False), (693.9, True)])
def test_clocks_and_power_are_told_of_each_arm_and_what_a_power_limit_means(tmp_path, one, watts, limited):
    torch = [results.gpu_state(1710, 560.0), results.gpu_state(1695, 690.0)]
    fused = [results.gpu_state(1650, watts), results.gpu_state(1635, 694.0)]
    text = written(with_cell(one, gpu={TORCH: torch, FUSED: fused}), tmp_path)
    assert "the GPU was at 1710 and 1695 of 1980 MHz and 560 and 690 of 700 W under torch" in words(text)
    assert f"1650 and 1635 of 1980 MHz and {watts:.0f} and 694 of 700 W under fused" in words(text)
    assert ("Under fused that is its power limit" in words(text)) == limited and "Under torch" not in text
    for state in ({}, {"clocks.sm": "1710 MHz"}, fused[0] | {"power.draw": "[N/A]"}):  # a GPU that does not tell
        assert "the GPU was at" not in words(written(with_cell(one, gpu={TORCH: [state], FUSED: [state]}), tmp_path))


def test_tables_fit_a_terminal_and_have_arms_control_and_conclusion(tmp_path):
    swept = [{"norm.kind": kind, "model.dropout": p} for kind, p in product(("layernorm", "rmsnorm"), ("0.0", "0.1"))]
    found = results.ablation(overrides=swept)
    lines = written(found, tmp_path).splitlines()[3:]
    assert max(len(line) for line in lines if not line.startswith("![")) <= 128
    text = report.table(found)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("eager", "compiled"))) <= 128
    for said in (TORCH, f"{AGAIN} (A/A)", "tokens/s", found.cells[0].verdict, "arity holds"):
        assert said in text
    assert re.search(rf"^{TORCH} .* 1\.200 \(.*\) +[\d,]+ +39\.70 +1,874$", text, re.M), "each figure under its heading"


def test_parity_is_drawn_as_dots_of_error_ratios_beside_the_accepted_band(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "finish", lambda figure, *_: figures.append(figure))
    plots.parity([results.parity_of({}), dataclasses.replace(results.parity_of({}, holds=False), arm="compiled")], tmp_path, "")
    (axes,) = figures[0].axes
    dots = [(float(line.get_xdata()[0]), line.get_color()) for line in axes.lines if line.get_marker() in ("o", "^")]
    for ratio, arm in ((1.02 / 0.99, "fused"), (7.4 / 0.99, "compiled")):
        assert [x for x, colour in dots if colour == ARMS[arm]["color"]] == pytest.approx([ratio] * 5)


def test_the_first_picture_has_the_speed_up_over_each_other_arm(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "finish", lambda figure, *_: figures.append(figure))
    cell = results.ablation([{}], ["eager"]).cells[0]
    plots.lead([plots.bars_of(cell)], tmp_path, "")
    told = [text.get_text() for text in figures[0].axes[0].texts]
    assert [words.split(" ms")[0] for words in told] == ["132.2", "120.2", "110.2"]
    assert "fused 1.200 (" in told[0] and "fused 1.09" in told[1] and "fused" not in told[2]
