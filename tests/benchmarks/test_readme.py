"""The tables of README.md and docs/, and the links between pages."""

import json
import re
import subprocess
from dataclasses import replace

import pytest

from ablation import records as ablations
from benchmarks import readme
from benchmarks.command import ResultsError
from tests.ablation import results

from .records import ENVIRONMENT, norm

TEXT = "before\n<!-- benchmarks: norms nvidia-h200 -->\nold\n<!-- end of benchmarks -->\nafter\n"


def write(path, *records, environment=ENVIRONMENT):
    path.write_text(json.dumps({"environment": environment, "command": "c", "records": records}))


def rewritten(marker, folder, text=TEXT):
    return readme.rewritten(text.replace("norms nvidia-h200", marker), folder.parent / "README.md", folder)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "results" / "nvidia-h200" / "norms.json"
    path.parent.mkdir(parents=True)
    write(path, norm("ln", 768, "ours", 0.9))
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
        ("norms nvidia-h200 768", "no add . norm of width 768 is recorded"),
        ("norms nvidia-h200 (768)", "not of the form"),
        ("ablation nvidia-h200", r"no report\.json; record an ablation there"),
        ("ablation nvidia-h200 gpt3", r"gpt3 has no report\.json"),
    ],
)
def test_marker_of_what_is_not_there_is_an_error(folder, marker, message):
    with pytest.raises(ResultsError, match=message):
        rewritten(marker, folder)


def test_recorded_ablations_have_a_row_for_each_cell_and_words_of_a_marker_choose_some(folder):
    found = results.ablation()
    for name in ("gpt2", "llama"):
        ablations.save(found, folder / "nvidia-h200" / "ablation" / name)
    revision = found.environment["git"]["revision"][:8]
    assert f"git {revision}\n" in rewritten("ablation nvidia-h200", folder)
    other = replace(found, environment=found.environment | {"git": {"revision": "abcdef0123", "dirty": False}})
    ablations.save(other, folder / "nvidia-h200" / "ablation" / "llama")
    assert f"git {revision} (gpt2), abcdef01 (llama)\n" in rewritten("ablation nvidia-h200", folder)
    rows = [line for line in rewritten("ablation nvidia-h200", folder).splitlines() if "report.md" in line]
    assert len(rows) == 2 * 4 and "eager, model.dropout=0.1 |" in rows[0] and "compiled, model.dropout=0.1 |" in rows[1]
    speedup = found.cells[0].fused.speedup
    assert "[gpt2](results/nvidia-h200/ablation/gpt2/report.md)" in rows[0], "relative to the page"
    assert f"| {speedup.median:.3f} ({speedup.low:.3f} to {speedup.high:.3f}) |" in rows[0] and "| 1.250 |" in rows[0]
    text = rewritten("ablation nvidia-h200 gpt2/model.dropout=0.0", folder)
    assert [line for line in text.splitlines() if "report.md" in line] == [row for row in rows[:4] if "dropout=0.0" in row]
    with pytest.raises(ResultsError, match="gpt2 has no cell with seed=1"):
        rewritten("ablation nvidia-h200 llama gpt2/seed=1", folder)


def commit(root, name, text):
    """Commits a file; returns the revision."""
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", name], [*who, "commit", "-q", "-m", text]):
        subprocess.run(["git", "-C", root, *words], check=True)
    readme.is_changed.cache_clear()
    return subprocess.check_output(["git", "-C", root, "rev-parse", "HEAD"], text=True).strip()


def test_a_table_says_which_code_is_newer_than_its_records_until_they_are_renewed(folder, tmp_path, monkeypatch):
    def page(revision, others=(), text=TEXT):
        records = [norm("ln", 768 + i, "ours", 0.9, revision=other) for i, other in enumerate(others, 1)]
        environment = ENVIRONMENT | {"git": {"revision": revision, "dirty": False}}
        write(folder / "nvidia-h200" / "norms.json", norm("ln", 768, "ours", 0.9), *records, environment=environment)
        return rewritten("norms nvidia-h200", folder, text)

    (root := tmp_path / "repository").mkdir()
    monkeypatch.setattr(readme, "ROOT", root)
    old = commit(root, "ops/kernel.py", "one")
    commit(root, "model/gpt.py", "of another table")
    assert "has changed" not in page(old)
    new = commit(root, "ops/kernel.py", "two")
    sentence = f"Since git {old[:8]} the code in `ops/` has changed. These figures are of older code.\n\n<!-- end"
    assert sentence in page(old) and sentence in page(new, others=[old]), "renewed in part"
    assert f"git {old[:8]} (2 measurements), {new[:8]} (1)\n" in page(new, others=[old, old]), "most first"
    assert "has changed" not in page(new, text=page(old)), "renewed"
    stale = page(old)
    monkeypatch.setattr(readme, "ROOT", tmp_path)  # no repository: nothing new is said, and what was said stays
    readme.is_changed.cache_clear()
    assert page(old, text=stale) == stale and "has changed" not in page(old)
    assert "has changed" not in page(new, text=stale), "it was said of other records"
    readme.is_changed.cache_clear()


def test_tables_of_readme_and_docs_are_those_of_the_recorded_results():
    readme.main(["--check"])


def anchors(text):
    """Of the headings of a page, as GitHub makes them: lower case, without punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)]+)\)|^\[\w+\]: (\S+)", text, re.MULTILINE)
    assert links
    for link in ("".join(pair) for pair in links):
        if not link.startswith("http"):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not heading or heading in anchors(target.read_text()), link
