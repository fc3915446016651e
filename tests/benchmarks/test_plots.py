import struct

import pytest

from benchmarks import host, memory, report, seed_figures
from measure.tables import machine

from .records import ENVIRONMENT, failed, norm, sweep


def size(path):
    """Width and height of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_a_picture_for_each_direction_and_number_of_rows(tmp_path):
    records = [*sweep(), norm("ln", 1024, "ours", 0.8, m=4096), failed("ln", 4096, "torch", m=4096)]
    written = report.plot_norms({"environment": ENVIRONMENT, "records": records}, tmp_path)
    assert [path.name for path in written] == ["norms_forward.png", "norms_backward.png", "norms_forward_m4096.png"]
    assert all(min(size(path)) > 300 for path in written)


@pytest.mark.parametrize("cases", [["ln"], ["ln", "rms"]], ids=["one panel", "two"])
def test_title_and_legend_of_all_libraries_lie_inside_the_picture(cases, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report.pyplot, "close", figures.append)
    records = [norm(case, n, name, 0.8) for case in cases for name in report.STYLES for n in (64, 1024)]
    report.plot_norms({"environment": ENVIRONMENT, "records": records}, tmp_path)
    (figure,) = figures
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(report.STYLES)
    for part in (legend, next(text for text in figure.texts if "cold L2" in text.get_text())):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height


def test_title_names_machine_versions_and_revision():
    assert machine(ENVIRONMENT) == "NVIDIA H200, torch 2.11.0, triton 3.6.0, quack-kernels 0.6.5, git 01234567"
    assert machine(ENVIRONMENT | {"gpu": None, "git": None}).startswith("CPU, torch")


def test_seed_figures_draw_what_there_is(tmp_path):
    def cell(figure, n, provider, **more):
        return {"figure": figure, "M": 4096, "N": n, "provider": provider, "us": n / 10, **more}

    records = [cell("a", n, p, gb_per_s=3000.0) for n in (1024, 2048) for p in ("ours", "torch", "tutorial")]
    records += [cell("c", n, "ours", gb_per_s=3000.0) for n in (32, 64)]
    records += [cell("d", n, "ours", kept=None) for n in (128, 256)]  # without a GPU memory is not counted
    records += [{"figure": "b", "M": 1, "N": 1, "provider": "ours", "us": None, "error": "no"}]
    written = seed_figures.plot({"environment": ENVIRONMENT, "records": records}, tmp_path)
    assert [path.name for path in written] == ["seed_a.png", "seed_c.png", "seed_d.png"]
    assert size(written[1])[0] > 1.5 * size(written[0])[0], "time and bandwidth side by side"


def bars(axes):
    """Label of a provider → how long its bars are, from the top down."""
    return {
        drawn.get_label(): [bar.get_width() for bar in drawn]
        for drawn in axes.containers
        if len(drawn) and hasattr(drawn, "patches")
    }


def test_host_has_a_bar_for_each_provider_and_whiskers_from_the_10th_to_the_90th_percentile(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report.pyplot, "close", figures.append)
    cell = {"case": "add_rms", "M": 8, "N": 64}
    records = [
        {**cell, "direction": d, "provider": p, "us": us, "p10": us - 4, "p90": us + 10}
        for d, times in (("forward", (45, 40, 23)), ("forward+backward", (190, 150, 120)))
        for p, us in zip(("ours", "ours-compiled", "torch"), times, strict=True)
    ]
    records.append({**cell, "direction": "forward", "provider": "quack-kernels", "us": None, "error": "no"})
    records.append({**records[0], "case": "ln"})  # of which backward has failed for all
    written = host.plot({"environment": ENVIRONMENT, "records": records}, tmp_path)
    assert [path.name for path in written] == ["host.png"] and min(size(written[0])) > 300
    forward, both, ln, nothing = figures[0].axes
    assert bars(ln) == {"ours": [45]} and bars(nothing) == {}
    assert bars(forward) == {"ours": [45], "torch": [23], "ours-compiled": [40]}, "the failed one has none"
    assert bars(both) == {"ours": [190], "torch": [120], "ours-compiled": [150]}
    ours = next(drawn for drawn in forward.containers if hasattr(drawn, "patches") and drawn.get_label() == "ours")
    ((left, right),) = [segment[:, 0] for segment in ours.errorbar.lines[2][0].get_segments()]
    assert (left, right) == (41, 55)


def test_memory_has_a_bar_for_each_block_and_provider_in_mib_a_block(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report.pyplot, "close", figures.append)
    mib = 2**20
    records = [
        {
            "case": c, "residual_dtype": r, "M": 32768, "N": n, "blocks": 4, "provider": p,
            "kept": 4 * kept * mib, "peak": 8 * kept * mib,
        }
        for n in (768, 4096)
        for c in ("dropout_add_ln", "dropout_add_rms")
        for r in ("bf16", "fp32")
        for p, kept in (("ours", n / 16), ("torch", n / 8))
    ]  # fmt: skip
    records.append({**records[0], "provider": "compile", "error": "no", "kept": None, "peak": None})
    records.append({**records[0], "blocks": 8})  # another chain
    written = memory.plot({"environment": ENVIRONMENT, "records": records}, tmp_path)
    assert [path.name for path in written] == ["memory.png"]
    kept, peak, _, wide, longer, _ = figures[0].axes
    assert bars(longer) == {"ours": [24]} and "8 blocks of 32768 × 768" in longer.get_title(loc="left")
    assert bars(kept) == {"ours": [48] * 4, "torch": [96] * 4} and bars(peak) == {"ours": [96] * 4, "torch": [192] * 4}
    assert bars(wide) == {"ours": [512] * 4, "torch": [1024] * 4}
    labels = [text.get_text() for text in kept.get_yticklabels()]
    assert labels[0] == "dropout+add+LN, bf16 stream" and kept.get_ylim()[0] > kept.get_ylim()[1], "the first is at the top"


@pytest.mark.parametrize("plot", [host.plot, memory.plot])
def test_nothing_measured_makes_no_bars(plot, tmp_path):
    records = [{"case": "add_rms", "provider": "ours", "us": None, "peak": None}]
    assert plot({"environment": ENVIRONMENT, "records": records}, tmp_path) == [] and not list(tmp_path.iterdir())
