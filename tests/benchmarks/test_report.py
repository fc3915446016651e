"""Tables and pictures of recorded norms."""

from benchmarks import report

from .records import ENVIRONMENT, norm


def file(*records):
    return {"environment": ENVIRONMENT, "records": list(records)}


def test_terminal_table_has_every_provider_the_fastest_and_ratios():
    lines = report.shares_text([
        norm("ln", 768, "ours", 0.9), norm("ln", 768, "torch", 0.3),
        norm("ln", 768, "quack-kernels", 0.6, times_ours=1.52, times_ours_95=[1.5, 1.55]),
        norm("ln", 1024, "ours", 0.8), norm("ln", 1024, "torch", 1.0, us=None, error="no memory"),
        norm("ln", 1024, "traffic", 0.99),
        norm("ln", 1024, "before", 0.9, times_ours=0.9, times_ours_95=None),
    ]).splitlines()  # fmt: skip
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    ratios = ["fastest other", "its time / ours", "before / ours"]
    assert cells[0] == ["% of copy bandwidth", "traffic", "ours", "before", "torch", "quack", *ratios]
    assert cells[1][1:] == ["–", "90", "–", "30", "60", "quack", "1.520 (1.500 to 1.550)", "–"]
    assert cells[2] == ["LN, forward 32768×1024", "99", "80", "90", "failed", "–", "–", "–", "0.900"]
    assert len({len(line) for line in lines}) == 1


def test_models_have_a_row_each_bold_where_ours_is_faster_by_more_than_chance():
    where = {"residual": "fp32", "weights": "fp32"}
    records = [
        *(norm("add_rms", n, "ours", 0.9, **where) for n in (4608, 2304)), norm("add_rms", 2304, "torch", 0.5, **where),
        norm("add_ln", 2304, "ours", 0.8, **where), norm("add_rms", 2304, "ours", 0.1, residual="bf16", weights="fp32"),
        norm("add_ln", 2304, "liger-kernel", 0.79, **where, times_ours_95=[0.99, 1.02]),
    ]  # fmt: skip
    assert report.shares_markdown(file(*records)).splitlines() == [
        "| forward, N = | add+LN | add+RMS |",
        "| --- | ---: | ---: |",
        "| 2304, Gemma 2 2B | 80 / 79 liger | **90** / 50 torch |",
        "| 4608, Gemma 2 27B | – | 90 |",
    ]


def test_the_picture_has_one_panel_of_the_widths_of_models_with_five_names(tmp_path, monkeypatch):
    figures, path = [], tmp_path / "norms_models.png"
    monkeypatch.setattr(report, "finish", lambda figure, *_: figures.append(figure))
    names, widths = ("traffic", "ours", "torch", "compile", "flash-attn", "liger-kernel", "quack-kernels"), (1152, 4608)
    records = [norm("add_rms", n, name, 0.9, direction="backward", residual="fp32") for n in widths for name in names]
    assert report.plot_shares(file(*records, norm("ln", 1024, "ours", 0.8)), path) and not report.plot_shares(file(), path)
    (axes,) = figures[0].axes
    assert [line.get_label() for line in axes.lines[:-1]] == ["fused (ours)", "torch.compile", "flash-attn", "Liger", "quack"]
