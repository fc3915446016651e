import json

import pytest

from ablation import records
from benchmarks import readme
from benchmarks.command import ResultsError
from tests.ablation import results

from .records import ENVIRONMENT, norm

TEXT = "before\n<!-- benchmarks: norms nvidia-h200 -->\nold\n<!-- end of benchmarks -->\nafter\n"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "results" / "nvidia-h200" / "norms.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"environment": ENVIRONMENT, "command": "c", "records": [norm("ln", 768, "ours", 0.9)]}))
    return tmp_path / "results"


def test_block_is_replaced_and_the_rest_stays(folder):
    text = readme.rewritten(TEXT, folder)
    assert text.startswith("before\n<!-- benchmarks: norms nvidia-h200 -->\n") and text.endswith(
        "<!-- end of benchmarks -->\nafter\n"
    )
    assert "| LN | 0.90 |" in text and "NVIDIA H200, torch 2.11.0" in text and "old" not in text
    assert readme.rewritten(text, folder) == text


@pytest.mark.parametrize(
    "marker, message",
    [
        ("norm nvidia-h200", "no table 'norm'; there are norms_models, norms"),
        ("norms cpu", "run python -m benchmarks.norms,"),
        ("norms_models nvidia-h200", "run python -m benchmarks.norms --models,"),
    ],
)
def test_marker_of_what_is_not_there_is_an_error(folder, marker, message):
    with pytest.raises(ResultsError, match=message):
        readme.rewritten(TEXT.replace("norms nvidia-h200", marker), folder)


def test_recorded_ablations_have_a_row_for_each_cell(folder):
    marker = TEXT.replace("norms nvidia-h200", "ablation nvidia-h200")
    with pytest.raises(ResultsError, match=r"no report\.json; record an ablation there"):
        readme.rewritten(marker, folder)
    found = results.ablation(overrides=[{"model.dropout": "0.1"}], modes=["eager", "compiled"])
    records.save(found, folder / "nvidia-h200" / "ablation" / "gpt2")
    text = readme.rewritten(marker, folder)
    rows = [line for line in text.splitlines() if "ablation/gpt2/report.md), " in line]
    assert [row.split("), ")[1].split(" |")[0] for row in rows] == ["eager, model.dropout=0.1", "compiled, model.dropout=0.1"]
    speedup = found.cells[0].fused.speedup
    assert f"| {speedup.median:.3f} ({speedup.low:.3f} to {speedup.high:.3f}) |" in rows[0] and "| 1.250 |" in rows[0]


def test_check_fails_until_the_readme_is_written(folder, tmp_path, capsys):
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


def test_the_tables_in_this_readme_are_those_of_the_recorded_results():
    readme.main(["--check"])
