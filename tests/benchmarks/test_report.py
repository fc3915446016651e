"""Tables and pictures of recorded norms."""

from benchmarks import report

from .records import ENVIRONMENT, norm


def file(*records):
    return {"environment": ENVIRONMENT, "records": list(records)}


def test_terminal_table_has_a_line_for_each_record():
    lines = report.text([
        norm("ln", 768, "ours", 0.5),
        norm("ln", 768, "quack-kernels", 0.4, times_ours=1.25, times_ours_95=[1.2, 1.3]),
        norm("ln", 768, "torch", 1.0, us=None, error="no memory"),
    ]).splitlines()  # fmt: skip
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    label = "LN, forward, bf16 weights, 32768 × 768"
    assert cells[0] == ["provider", "µs", "% of copy bandwidth", "its time / ours"]
    assert cells[1] == [label, "ours", "20.0", "50", "–"]
    assert cells[2] == [label, "quack-kernels", "25.0", "40", "1.250 (1.200 to 1.300)"]
    assert cells[3] == [label, "torch", "–", "failed", "no memory"]


def test_models_have_a_row_each_bold_where_ours_is_faster_by_more_than_chance():
    where = {"residual": "fp32", "weights": "fp32"}
    records = [
        *(norm("add_rms", n, "ours", 0.9, **where) for n in (4608, 2304)), norm("add_rms", 2304, "torch", 0.5, **where),
        norm("add_rms", 2304, "traffic", 0.99, **where),  # of older records: no library
        norm("add_ln", 2304, "ours", 0.8, **where), norm("add_rms", 2304, "ours", 0.1, residual="bf16", weights="fp32"),
        norm("add_ln", 2304, "liger-kernel", 0.79, **where, times_ours_95=[0.99, 1.02]),
    ]  # fmt: skip
    assert report.markdown(file(*records)).splitlines() == [
        "| forward, N = | add+LN | add+RMS |",
        "| --- | ---: | ---: |",
        "| 2304, Gemma 2 2B | 80 / 79 liger | **90** / 50 torch |",
        "| 4608, Gemma 2 27B | – | 90 |",
    ]
    assert report.by_width(file(*records), ["4608"]).splitlines()[2] == "| 4608, Gemma 2 27B | – | – | 90 | – |"


def test_the_picture_has_one_panel_of_the_widths_of_models_with_five_names(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(report, "finish", lambda figure, *_: figures.append(figure))
    names, widths = ("traffic", "ours", "torch", "compile", "flash-attn", "liger-kernel", "quack-kernels"), (1152, 4608)
    records = [norm("add_rms", n, name, 0.9, direction="backward", residual="fp32") for n in widths for name in names]
    report.plot(file(*records, norm("ln", 1024, "ours", 0.8)), tmp_path / "norms_models.png")
    (axes,) = figures[0].axes
    assert [line.get_label() for line in axes.lines[:-1]] == ["fused (ours)", "torch.compile", "flash-attn", "Liger", "quack"]
