import json

import pytest

from benchmarks import readme
from benchmarks.results import ResultsError

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
    [("norm nvidia-h200", "no table 'norm'; there are norms"), ("norms cpu", "run python -m benchmarks.norms")],
)
def test_marker_of_what_is_not_there_is_an_error(folder, marker, message):
    with pytest.raises(ResultsError, match=message):
        readme.rewritten(TEXT.replace("norms nvidia-h200", marker), folder)


def test_check_fails_until_the_readme_is_written(folder, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    options = ["--readme", str(path), "--results", str(folder)]
    with pytest.raises(SystemExit, match=r"run python -m benchmarks\.readme"):
        readme.main([*options, "--check"])
    assert path.read_text() == TEXT
    readme.main(options)
    readme.main([*options, "--check"])


def test_the_tables_in_this_readme_are_those_of_the_recorded_results():
    readme.main(["--check"])
