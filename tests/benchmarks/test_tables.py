from benchmarks import memory, report, seed_figures

from .records import failed, norm


def test_terminal_table_has_every_provider_the_fastest_and_ratios():
    records = [
        norm("ln", 768, "ours", 0.9), norm("ln", 768, "torch", 0.3), norm("ln", 768, "ours-seeded", 0.95),
        norm("ln", 768, "quack-kernels", 0.6, times_ours=1.52, times_ours_95=[1.5, 1.55]),
        norm("ln", 1024, "ours", 0.8), failed("ln", 1024, "torch"),
        norm("ln", 1024, "before", 0.9, times_ours=0.9, times_ours_95=None),
    ]  # fmt: skip
    lines = report.norms_text(records).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    ratios = ["fastest other", "its time / ours", "before / ours"]
    assert cells[0] == ["share of copy bandwidth", "ours", "ours-seeded", "before", "torch", "quack", *ratios]
    assert cells[1] == ["LN, forward 32768×768", "0.90", "0.95", "–", "0.30", "0.60", "quack", "1.520 (1.500 to 1.550)", "–"]
    assert cells[2] == ["LN, forward 32768×1024", "0.80", "–", "0.90", "failed", "–", "–", "–", "0.900"]
    assert len({len(line) for line in lines}) == 1


def test_sweeps_of_different_rows_and_capped_rows_stay_apart():
    records = [
        norm("ln", 1024, "ours", 0.9),
        norm("ln", 65536, "ours", 0.7, m=8192, asked=32768),
        norm("ln", 1024, "ours", 0.6, m=4096),
    ]
    sweeps = report.by_rows(records)
    assert {rows: [r["N"] for r in sweep] for rows, sweep in sweeps.items()} == {32768: [1024, 65536], 4096: [1024]}


def test_markdown_shows_ours_and_the_best_peer_bold_where_ours_is_faster_by_more_than_chance():
    records = [
        norm("add_rms", 768, "ours", 0.9, residual="bf16"),
        norm("add_rms", 768, "liger-kernel", 0.89, residual="bf16", times_ours_95=[0.99, 1.02]),
        norm("add_rms", 1024, "ours", 0.97, residual="bf16"), norm("add_rms", 1024, "torch", 0.5, residual="bf16"),
        norm("add_rms", 1024, "torch", 0.4, residual="bf16", m=4096), norm("ln", 768, "ours", 0.5, direction="backward"),
    ]  # fmt: skip
    text = report.norms_markdown(records)
    assert "| forward, N = | 768 | 1024 |" in text
    assert "| add+RMS, bf16 stream | 0.90 / 0.89 liger | **0.97** / 0.50 torch |" in text
    assert "| backward, N = | 768 |" in text and "| LN | 0.50 |" in text


def test_models_have_a_row_each_with_the_stream_of_training():
    where = {"residual": "fp32", "weights": "fp32"}
    records = [
        *(norm("add_rms", n, "ours", 0.9, **where) for n in (4608, 2304)), norm("add_rms", 2304, "torch", 0.5, **where),
        norm("add_ln", 2304, "ours", 0.8, **where), norm("add_rms", 2304, "ours", 0.1, residual="bf16", weights="fp32"),
    ]  # fmt: skip
    assert report.models_markdown(records).splitlines() == [
        "| forward, N = | add+LN | add+RMS |",
        "| --- | ---: | ---: |",
        "| 2304, Gemma 2 2B | 0.80 | **0.90** / 0.50 torch |",
        "| 4608, Gemma 2 27B | – | 0.90 |",
    ]


def test_host_and_memory_tables():
    host = [
        {"case": "add_rms", "direction": d, "provider": p, "us": us, "p10": us - 1, "p90": us + 1}
        for p, us in (("torch", 25.0), ("ours", 60.0), ("ours-compiled", 80.0))
        for d in ("forward", "forward+backward")
    ]
    assert host.host_rows(host[:5]) == [
        ["ours", "60 (59 to 61)", "60 (59 to 61)"],
        ["ours-compiled", "80 (79 to 81)", "–"],
        ["torch", "25 (24 to 26)", "25 (24 to 26)"],
    ]

    cell = {"case": "dropout_add_ln", "residual_dtype": "fp32", "M": 32768, "N": 768, "blocks": 8}
    rows = memory.memory_rows([
        {**cell, "provider": "ours", "kept": 8 * 96 * 2**20, "peak": 8 * 200 * 2**20},
        {**cell, "provider": "torch", "error": "no"},
        {**cell, "provider": "torch", "kept": None, "peak": None},
    ])  # fmt: skip
    assert [row[4:] for row in rows] == [["96", "200"], ["failed", "failed"], ["–", "–"]]


def test_seed_tables_show_bandwidth_for_a_and_time_for_others():
    def cell(figure, n, provider, **more):
        return {"figure": figure, "M": 4096, "N": n, "provider": provider, "us": 12.34, **more}

    records = [cell("a", 1024, "ours", gb_per_s=3900.4), cell("a", 1024, "torch", us=None, error="no"), cell("d", 128, "ours")]
    found = seed_figures.seed_tables(records)
    assert list(found) == ["a", "d"]
    assert found["a"][1:] == (["N", "ours", "torch"], [["1024", "3900", "failed"]])
    assert found["d"][2] == [["128", "12.3"]]
