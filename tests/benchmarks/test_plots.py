import struct

import pytest

from benchmarks import plots, seed_plots

from .records import ENVIRONMENT, failed, norm, sweep


def size(path):
    """Width and height of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_a_picture_for_each_direction_and_number_of_rows(tmp_path):
    records = [*sweep(), norm("ln", 1024, "ours", 0.8, m=4096), failed("ln", 4096, "torch", m=4096)]
    written = plots.norms({"environment": ENVIRONMENT, "records": records}, tmp_path)
    assert [path.name for path in written] == ["norms_forward.png", "norms_backward.png", "norms_forward_m4096.png"]
    assert all(min(size(path)) > 300 for path in written)


def test_other_weights_get_pictures_of_their_own(tmp_path):
    written = plots.norms({"environment": ENVIRONMENT, "records": [norm("ln", 64, "ours", 0.8, weights="fp32")]}, tmp_path)
    assert [path.name for path in written] == ["norms_forward_weights_fp32.png"]


def test_failures_alone_make_no_picture(tmp_path):
    assert plots.norms({"environment": ENVIRONMENT, "records": [failed("ln", 768, "ours")]}, tmp_path) == []


@pytest.mark.parametrize("cases", [["ln"], ["ln", "rms"]], ids=["one panel", "two"])
def test_title_and_legend_of_all_libraries_lie_inside_the_picture(cases, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots.pyplot, "close", figures.append)
    records = [norm(case, n, name, 0.8) for case in cases for name in plots.STYLES for n in (64, 1024)]
    plots.norms({"environment": ENVIRONMENT, "records": records}, tmp_path)
    (figure,) = figures
    (legend,) = figure.legends
    assert len(legend.get_texts()) == len(plots.STYLES)
    for part in (legend, next(text for text in figure.texts if "cold L2" in text.get_text())):
        box = part.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height


def test_title_names_machine_versions_and_revision():
    assert plots.machine(ENVIRONMENT) == "NVIDIA H200, torch 2.11.0, triton 3.6.0, quack-kernels 0.6.5, git 01234567"
    assert plots.machine(ENVIRONMENT | {"gpu": None, "git": None}).startswith("CPU, torch")


def test_seed_figures_draw_what_there_is(tmp_path):
    def cell(figure, n, provider, **more):
        return {"figure": figure, "M": 4096, "N": n, "provider": provider, "us": n / 10, **more}

    records = [cell("a", n, p, gb_per_s=3000.0) for n in (1024, 2048) for p in ("ours", "torch", "tutorial")]
    records += [cell("c", n, "ours", gb_per_s=3000.0) for n in (32, 64)]
    records += [cell("d", n, "ours", kept=None) for n in (128, 256)]  # without a GPU memory is not counted
    records += [{"figure": "b", "M": 1, "N": 1, "provider": "ours", "us": None, "error": "no"}]
    written = seed_plots.seed_figures({"environment": ENVIRONMENT, "records": records}, tmp_path)
    assert [path.name for path in written] == ["seed_a.png", "seed_c.png", "seed_d.png"]
    assert size(written[1])[0] > 1.5 * size(written[0])[0], "time and bandwidth side by side"
