"""report.md: what its reader meets, in which order, and what its pictures show."""

import dataclasses
import re

import pytest

from ablation import plots, report
from ablation.records import recorded
from measure.attribution import Share
from measure.comparison import AGAIN, FUSED, NO_KERNEL, TORCH
from tests.ablation import results


def written(found, folder) -> str:
    """The report; without its pictures, which would take longer than the rest of a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lead", "attributions", "parity"):
            patch.setattr(plots, name, lambda *_: True)
        return report.write(found, folder).read_text(encoding="utf-8")


def words(text) -> str:
    return " ".join(text.split())


def row(text, start):
    return [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith(start)).split("|")[2:-1]]


def test_report_has_every_section_and_its_pictures(tmp_path):
    found = results.ablation()
    text = report.write(found, tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == [
        "What was measured", "Every pair", "Where the time goes", "Step times", "Environment", "Command",
    ]  # fmt: skip
    pictures = re.findall(r"\]\((\S+)\)", text)
    assert pictures == ["speedup.png", "attribution.png", "parity.png"]
    assert text.index("parity.png") < text.index("## What was measured"), "verdict and pictures come first"
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    assert "NVIDIA H200" in text and re.search(r"git\.dirty +yes", text) and found.command in text
    assert max(len(line) for line in text.splitlines()[1:] if not line.startswith("![")) <= 140, "tables fit a terminal"


def test_the_verdict_comes_first(tmp_path):
    found = results.ablation(overrides=[{}])
    text = written(found, tmp_path)
    assert re.match(r"# Fused against the fastest other arm: eager 1\.09\d ×; compiled 1\.0\d\d ×; parity holds\n", text)
    assert all(f"{cell.verdict}." in words(text) for cell in found.cells) and "Parity holds: as far as others." in words(text)
    worse = dataclasses.replace(results.ablation(compiled=1.0, parity=False), unfinished="2 of 8 parts")
    first = written(worse, tmp_path).splitlines()[0]
    assert first.startswith("# NOT FINISHED (2 of 8 parts). ") and first.endswith("parity FAILS")
    assert "compiled, model.dropout=0.1 no difference found" in first
    on_cpu = results.ablation(overrides=[{}], modes=["eager"], kernels=False)
    text = written(on_cpu, tmp_path)
    assert text.startswith(f"# {NO_KERNEL};") and report.table(on_cpu).startswith(NO_KERNEL)
    assert "Where the time goes" not in text


def test_the_fastest_step_of_all_cells_comes_first_where_there_are_graphs(tmp_path):
    """40 ms with fused norms in a graph, 45 with sites that are compiled alone, 44 with PyTorch's in a model compiled whole."""
    for modes, other in (
        (["eager", "compiled", "graph"], r"45\.\d+ ms \(compiled, graph\): 1\.13\d × \(95 % 1\.1\d+ to 1\.1\d+\)\."),
        (["graph", "compiled graph"], r"44\.\d+ ms \(torch, compiled graph\): 1\.1\d+ ×, of two cells\."),
    ):
        found = words(written(results.ablation(overrides=[{}], modes=modes), tmp_path)).split("- ")[1]
        assert re.match(
            r"All cells: the fastest step with fused takes 40\.\d+ ms \(graph\), the fastest with another arm " + other, found
        ), found
    own = results.ablation(overrides=[{}], modes=["compiled graph"])
    assert "All cells" not in written(own, tmp_path), "there is one way to compare with"


def test_gpu_time_stands_beside_the_timed_step_and_the_amdahl_limit_over_each_base(tmp_path):
    one = results.ablation(overrides=[{}], modes=["eager"])
    text = written(one, tmp_path)
    timed, idle = ([float(entry) for entry in row(text, start)] for start in ("| all", "| idle"))
    assert timed == pytest.approx([131.7, 131.7 / 1.1, 131.7 / 1.2], rel=0.02)
    assert idle == pytest.approx([0.05 * 131.7] * 3, rel=0.2)
    assert "must move 40.00 GB, which takes 9.756 ms at the 4,100 GB/s" in words(text) and "is CPU-bound." not in words(text)
    assert "at copy bandwidth this step is 1.250 × as fast as with torch (fused saves 83 %" in words(text)
    assert "The norms of torch ran norm_kernel." in words(text)
    (cell,) = one.cells
    half = {arm: [Share("GEMM", ms, 9), Share("norm", 1.0, 9)] for arm, ms in ((TORCH, 65), ("compiled", 60), (FUSED, 54))}
    waits = dataclasses.replace(cell, attribution=dataclasses.replace(cell.attribution, shares=half))
    text = words(written(dataclasses.replace(one, cells=[waits]), tmp_path))
    assert "The GPU is idle in 50 % of a step under torch" in text and "this step is CPU-bound." in text


def test_a_terminal_gets_arms_control_and_conclusion():
    found = results.ablation()
    text = report.table(found)
    for said in (TORCH, f"{AGAIN} (A/A)", "tokens/s", found.cells[0].verdict, "arity holds"):
        assert said in text
    assert re.search(rf"^{TORCH} .* [\d,]+ +39\.70 +1,874$", text, re.M), "each figure under its heading"


def test_parity_is_drawn_as_dots_of_error_ratios_and_the_first_picture_has_the_speed_up_over_each_arm(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("measure.plots.save_figure", lambda figure, _: figures.append(figure))
    plots.parity([results.parity_of({}), results.parity_of({}, holds=False)], tmp_path, "card and versions")
    monkeypatch.setattr(plots, "FAR", 1.1)
    plots.lead({"eager": recorded(results.ablation([{}], ["eager"]).cells[0])}, tmp_path, "")
    assert "card and versions" in [text.get_text() for text in figures[0].texts]
    dots = [float(line.get_xdata()[0]) for line in figures[0].axes[0].lines if line.get_marker() == "o"]
    assert dots == pytest.approx([1.02] * 5 + [7.4] * 5)
    bars, gains = figures[1].axes
    assert [text.get_text() for text in bars.texts] == ["eager", "132.2 ms", "120.2 ms", "110.2 ms"]
    plain, fastest = (text.get_text() for text in gains.texts)
    assert fastest.startswith("1.09") and plain.startswith("1.200 (")
    (dot,) = (float(line.get_xdata()[0]) for line in gains.lines if line.get_marker() == "o")
    assert dot == pytest.approx(1.091, abs=1e-3), "the fastest other arm's; that of torch is beyond the axis"
