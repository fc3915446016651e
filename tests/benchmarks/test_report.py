"""Tables and pictures of recorded norms; the bars of host and memory; the tables of README.md."""

import json
import struct

import pytest

from ablation import records as ablations
from benchmarks import host, memory, readme, report
from benchmarks.command import ResultsError
from tests.ablation import results

from .records import ENVIRONMENT, failed, norm, sweep


def size(path):
    """Width and height of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def file(*records):
    return {"environment": ENVIRONMENT, "records": list(records)}


# ---- tables ------------------------------------------------------------------------------------------------------------------


def test_terminal_table_has_every_provider_the_fastest_and_ratios():
    lines = report.norms_text([
        norm("ln", 768, "ours", 0.9), norm("ln", 768, "torch", 0.3), norm("ln", 768, "ours-seeded", 0.95),
        norm("ln", 768, "quack-kernels", 0.6, times_ours=1.52, times_ours_95=[1.5, 1.55]),
        norm("ln", 1024, "ours", 0.8), failed("ln", 1024, "torch"), norm("ln", 1024, "traffic", 0.99),
        norm("ln", 1024, "before", 0.9, times_ours=0.9, times_ours_95=None),
    ]).splitlines()  # fmt: skip
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    ratios = ["fastest other", "its time / ours", "before / ours"]
    assert cells[0] == ["share of copy bandwidth", "traffic", "ours", "ours-seeded", "before", "torch", "quack", *ratios]
    assert cells[1][1:] == ["–", "0.90", "0.95", "–", "0.30", "0.60", "quack", "1.520 (1.500 to 1.550)", "–"]
    assert cells[2] == ["LN, forward 32768×1024", "0.99", "0.80", "–", "0.90", "failed", "–", "–", "–", "0.900"]
    assert len({len(line) for line in lines}) == 1


def test_markdown_shows_ours_and_the_best_peer_bold_where_ours_is_faster_by_more_than_chance():
    text = report.norms_markdown([
        norm("add_rms", 768, "ours", 0.9, residual="bf16"),
        norm("add_rms", 768, "liger-kernel", 0.89, residual="bf16", times_ours_95=[0.99, 1.02]),
        norm("add_rms", 1024, "ours", 0.97, residual="bf16"), norm("add_rms", 1024, "torch", 0.5, residual="bf16"),
        norm("add_rms", 1024, "torch", 0.4, residual="bf16", m=4096), norm("ln", 768, "ours", 0.5, direction="backward"),
    ])  # fmt: skip
    assert "| forward, N = | 768 | 1024 |" in text and "| backward, N = | 768 |" in text and "| LN | 0.50 |" in text
    assert "| add+RMS, bf16 stream | 0.90 / 0.89 liger | **0.97** / 0.50 torch |" in text


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


# ---- pictures ----------------------------------------------------------------------------------------------------------------


def test_a_picture_for_each_direction_number_of_rows_and_dtype_of_weights(tmp_path):
    records = [*sweep(), norm("ln", 1024, "ours", 0.8, m=4096), failed("ln", 4096, "torch", m=4096)]
    written = report.plot_norms(file(*records, norm("ln", 64, "ours", 0.8, weights="fp32")), tmp_path)
    names = ["norms_forward.png", "norms_backward.png", "norms_forward_m4096.png", "norms_forward_weights_fp32.png"]
    assert [path.name for path in written] == names and all(min(size(path)) > 300 for path in written)
    assert report.plot_norms(file(failed("ln", 768, "ours")), tmp_path) == [], "failures alone make no picture"


@pytest.mark.parametrize("plot", [host.plot, memory.plot])
def test_nothing_measured_makes_no_bars(plot, tmp_path):
    assert plot(file({"case": "add_rms", "provider": "ours", "us": None, "peak": None}), tmp_path) == []


# ---- README.md ---------------------------------------------------------------------------------------------------------------

TEXT = "before\n<!-- benchmarks: norms nvidia-h200 -->\nold\n<!-- end of benchmarks -->\nafter\n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "results" / "nvidia-h200" / "norms.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(file(norm("ln", 768, "ours", 0.9)) | {"command": "c"}))
    return tmp_path / "results"


def test_a_marked_block_is_replaced_the_rest_stays_and_check_fails_until_then(folder, tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    options = ["--readme", str(path), "--results", str(folder)]
    with pytest.raises(SystemExit, match=r"run python -m benchmarks\.readme"):
        readme.main([*options, "--check"])
    assert path.read_text() == TEXT
    readme.main(options)
    readme.main([*options, "--check"])
    written, as_it_was = capsys.readouterr().out.splitlines()
    assert f"{path}: written" in written and f"{path}: as it was" in as_it_was
    text = path.read_text()
    assert text.startswith(TEXT[: TEXT.index("old")]) and text.endswith("<!-- end of benchmarks -->\nafter\n")
    assert "| LN | 0.90 |" in text and "old" not in text
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, quack-kernels 0.6.5, git 01234567" in text


@pytest.mark.parametrize(
    "marker, message",
    [
        ("norm nvidia-h200", "no table 'norm'; there are norms_models, norms"),
        ("norms cpu", "run python -m benchmarks.norms,"),
        ("norms_models nvidia-h200", "run python -m benchmarks.norms --models,"),
        ("ablation nvidia-h200", r"no report\.json; record an ablation there"),
    ],
)
def test_marker_of_what_is_not_there_is_an_error(folder, marker, message):
    with pytest.raises(ResultsError, match=message):
        readme.rewritten(TEXT.replace("norms nvidia-h200", marker), folder)


def test_recorded_ablations_have_a_row_for_each_cell(folder):
    found = results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager", "compiled"])
    ablations.save(found, folder / "nvidia-h200" / "ablation" / "gpt2")
    text = readme.rewritten(TEXT.replace("norms nvidia-h200", "ablation nvidia-h200"), folder)
    rows = [line for line in text.splitlines() if "ablation/gpt2/report.md), " in line]
    assert [row.split("), ")[1].split(" |")[0] for row in rows] == ["eager, model.dropout=0.1", "compiled, model.dropout=0.1"]
    speedup = found.cells[0].fused.speedup
    assert f"| {speedup.median:.3f} ({speedup.low:.3f} to {speedup.high:.3f}) |" in rows[0] and "| 1.250 |" in rows[0]


def test_the_tables_in_this_readme_are_those_of_the_recorded_results():
    readme.main(["--check"])
