"""report.md: what its reader meets, in which order, and what its pictures show."""

import dataclasses
import re

import pytest

from ablation import plots, report
from ablation.records import recorded
from measure.attribution import Share
from measure.comparison import FUSED, NO_KERNEL, TORCH
from tests.ablation import results


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written(ablation): title and text of its report; without pictures, which would take longer."""

    def written(found) -> tuple[str, str]:
        with monkeypatch.context() as patch:
            for name in ("lead", "attributions", "parity"):
                patch.setattr(plots, name, lambda *_: True)
            title, *lines = report.write(found, tmp_path).read_text(encoding="utf-8").splitlines()
            return title, " ".join(" ".join(lines).split())

    return written


def one(mode="eager", **more):
    return results.ablation([{}], [mode], **more)


def test_report_has_every_section_and_its_pictures(tmp_path):
    found = one()
    text = report.write(found, tmp_path).read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$|^!\[.*\]\((.*)\)$", text, re.M)
    pictures = ["speedup.png", "attribution.png", "parity.png"]
    sections = ["What was measured", "Every pair", "Where the time goes", "Step times", "Environment", "Command"]
    assert ["".join(pair) for pair in headings] == pictures + sections, "verdict and pictures come first"
    assert all((tmp_path / name).stat().st_size > 5000 for name in pictures)
    assert "NVIDIA H200" in text and re.search(r"git\.dirty +yes", text) and found.command in text


def test_the_verdict_comes_first(written):
    found = results.ablation(overrides=[{}])
    title, text = written(found)
    assert re.fullmatch(r"# Fused against the fastest other arm: eager 1\.09\d ×; compiled 1\.0\d\d ×; parity holds", title)
    for said in (*(cell.verdict for cell in found.cells), found.parity[0].verdict):
        assert said in text and said in report.table(found)
    worse = dataclasses.replace(one("compiled", compiled=1.0, parity=False), unfinished="2 of 8 parts")
    title, _ = written(worse)
    assert title.startswith("# NOT FINISHED (2 of 8 parts). ") and title.endswith("compiled no difference found; parity FAILS")
    on_cpu = one(kernels=False)
    title, text = written(on_cpu)
    assert title.startswith(f"# {NO_KERNEL};") and report.table(on_cpu).startswith(NO_KERNEL)
    assert "Where the time goes" not in text


@pytest.mark.parametrize(
    ("modes", "other"),
    [
        (["compiled", "graph"], r"45\.\d+ ms \(compiled, graph\): 1\.13\d × \(95 % 1\.1\d+ to 1\.1\d+\)\."),
        (["graph", "compiled graph"], r"44\.\d+ ms \(torch, compiled graph\): 1\.1\d+ ×, of two cells\."),
    ],
)
def test_the_fastest_step_of_all_cells_comes_first_where_there_are_graphs(modes, other, written):
    """40 ms with fused norms in a graph, 45 with sites that are compiled alone, 44 with PyTorch's in a model compiled whole."""
    _, text = written(results.ablation([{}], modes))
    ours = r"- All cells: the fastest step with fused takes 40\.\d+ ms \(graph\), the fastest with another arm "
    assert re.match(ours + other, text)


def test_gpu_time_stands_beside_the_timed_step_and_the_amdahl_limit_over_each_base(written):
    found = one()
    _, text = written(found)
    timed, idle = (
        [float(ms) for ms in re.search(rf"\| {row} +\|([ \d.|]+)\|", text)[1].split("|")[:3]] for row in ("all", "idle")
    )
    assert timed == pytest.approx([131.7, 131.7 / 1.1, 131.7 / 1.2], rel=0.02)
    assert idle == pytest.approx([0.05 * 131.7] * 3, rel=0.2)
    assert "must move 40.00 GB, which takes 9.756 ms at the 4,100 GB/s" in text and "is CPU-bound." not in text
    assert "at copy bandwidth this step is 1.250 × as fast as with torch (fused saves 83 %" in text
    assert "The norms of torch ran norm_kernel." in text
    (cell,) = found.cells
    half = {arm: [Share("GEMM", ms, 9), Share("norm", 1.0, 9)] for arm, ms in ((TORCH, 65), ("compiled", 60), (FUSED, 54))}
    waits = dataclasses.replace(cell, attribution=dataclasses.replace(cell.attribution, shares=half))
    _, text = written(dataclasses.replace(found, cells=[waits]))
    assert "The GPU is idle in 50 % of a step under torch" in text and "this step is CPU-bound." in text


def test_parity_is_drawn_as_dots_of_error_ratios_and_the_first_picture_has_the_speed_up_over_each_arm(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("measure.plots.save_figure", lambda figure, _: figures.append(figure))
    plots.parity([results.parity_of({}), results.parity_of({}, holds=False)], tmp_path, "")
    monkeypatch.setattr(plots, "FAR", 1.1)
    plots.lead({"eager": recorded(one().cells[0])}, tmp_path, "")
    ratios, (bars, gains) = (figure.axes for figure in figures)
    dots, over = ([float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"] for axes in (*ratios, gains))
    assert dots == pytest.approx([1.02] * 5 + [7.4] * 5)
    assert [text.get_text() for text in bars.texts] == ["eager", "132.2 ms", "120.2 ms", "110.2 ms"]
    assert [text.get_text()[:6] for text in gains.texts] == ["1.200 ", "1.091 "]
    assert over == pytest.approx([1.091], abs=1e-3), "the fastest other arm's; that of torch is beyond the axis"
