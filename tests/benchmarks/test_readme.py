"""The tables of README.md and docs/, and the links between pages."""

import json
import re
from dataclasses import replace

import pytest

from ablation import records as ablations
from benchmarks import readme
from measure import sources
from tests.ablation import results

from .records import ENVIRONMENT, norm

TEXT = "before\n<!-- benchmarks: norms_models nvidia-h200 -->\nold\n<!-- end of benchmarks -->\nafter\n"


def write(path, *records, environment=ENVIRONMENT):
    path.write_text(json.dumps({"environment": environment, "command": "c", "records": records}))


def rewritten(marker, folder):
    return readme.rewritten(TEXT.replace("norms_models nvidia-h200", marker), folder.parent / "README.md", folder)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "results" / "nvidia-h200" / "norms_models.json"
    path.parent.mkdir(parents=True)
    write(path, norm("add_ln", 768, "ours", 0.9, residual="fp32"))
    return tmp_path / "results"


def test_a_marked_block_is_replaced_the_rest_stays_and_check_fails_until_then(folder, tmp_path, monkeypatch):
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    for name, value in {"PAGES": [path], "FOLDER": folder, "draw": lambda folder: None}.items():
        monkeypatch.setattr(readme, name, value)
    with pytest.raises(SystemExit, match=r"run python -m benchmarks\.readme"):
        readme.main(["--check"])
    assert path.read_text() == TEXT
    readme.main([])
    readme.main(["--check"])
    text = path.read_text()
    assert text.startswith(TEXT[: TEXT.index("old")]) and text.endswith("<!-- end of benchmarks -->\nafter\n")
    assert "| 768 | 90 |" in text and "old" not in text
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, quack-kernels 0.6.5, git 01234567" in text


def test_marker_of_what_is_not_there_is_an_error_or_says_what_records_it(folder):
    for marker, message in {
        "norm nvidia-h200": "no table 'norm'; there are norms_models, sites, rotary, losses, .*, headline and versions",
        "norms_models nvidia-h200 (768)": "not of the form",
        "ablation nvidia-h200 gpt3": r"gpt3/report\.json",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            rewritten(marker, folder)
    assert "Not recorded on nvidia-h200 yet: `python -m benchmarks.records sites`" in rewritten("sites nvidia-h200", folder)


def recorded(folder, name):
    """The first cell of a record."""
    return json.loads((folder / "nvidia-h200" / "ablation" / name / "report.json").read_text())["cells"][0]


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
    cell = found.cells[0]
    over_compiled, over_torch = (cell.against(base).speedup for base in ("compiled", "torch"))
    assert cell.fastest == "compiled" and "[gpt2](results/nvidia-h200/ablation/gpt2/report.md)" in rows[0], (
        "relative to the page"
    )
    told = [f"{one.median:.3f} ({one.low:.3f} to {one.high:.3f})" for one in (over_compiled, over_torch)]
    assert f"| {told[0]} | {told[1]} |" in rows[0] and rows[0].endswith("| 1.136 |")
    torch_ms, compiled_ms, fused_ms = (readme.median(recorded(folder, "gpt2"), arm) for arm in ("torch", "compiled", "fused"))
    assert f"| {torch_ms} | compiled, {compiled_ms} | {fused_ms} |" in rows[0]
    line = rewritten("headline nvidia-h200 gpt2", folder).splitlines()[3]
    assert line.startswith("- **gpt2, eager, model.dropout=0.1**: against compiled ")
    assert f"{compiled_ms} → {fused_ms} ms, {told[0]} ×; against torch {torch_ms} → {fused_ms} ms, {told[1]} ×" in line
    text = rewritten("ablation nvidia-h200 gpt2/model.dropout=0.0", folder)
    assert [line for line in text.splitlines() if "report.md" in line] == [row for row in rows[:4] if "dropout=0.0" in row]
    with pytest.raises(ValueError, match="no cell with seed=1"):
        rewritten("ablation nvidia-h200 llama gpt2/seed=1", folder)


def test_a_table_is_old_once_the_sources_of_what_was_measured_differ_and_not_before(folder):
    def page(sources):
        file = folder / "nvidia-h200" / "norms_models.json"
        write(file, norm("add_ln", 768, "ours", 0.9, residual="fp32"), environment=ENVIRONMENT | {"sources": sources})
        return rewritten("norms_models nvidia-h200", folder)

    now = readme.fingerprints()
    assert "Old: " not in page(now)
    assert "Old: " not in page(now | {"step": "another", "rotary": "another"}), "norms know neither the model nor other kernels"
    assert "Old: the measured code has changed since this was recorded." in page(now | {"norms": "another"})
    assert "Old: " in page({}), "recorded before there were fingerprints"


def test_comments_docstrings_and_blank_lines_are_no_change_of_the_sources_and_anything_else_is():
    code = 'def f(x):\n    """One."""\n    # two\n\n    return "# 3" + x  # four\n'
    same = '# new\ndef f(x):\n    """Another."""\n    return "# 3" + x\n'
    assert sources.stripped(code) == sources.stripped(same) == 'def f(x):\n    return "# 3" + x'
    assert sources.stripped(code) != sources.stripped(code.replace("# 3", "# 4"))


def test_a_change_of_a_file_changes_the_fingerprints_of_what_is_made_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    before = {}

    def changed_by(name):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
        now = sources.fingerprints()
        changed = [what for what in now if now[what] != before.get(what)]
        before.update(now)
        return changed

    assert changed_by("ops/kernels/forward.py") == list(sources.SOURCES)
    assert changed_by("model/gpt.py") == ["step", "ranks"]
    assert changed_by("ops/kernels/rotary.py") == ["rotary", "step", "ranks"]
    assert changed_by("ops/functional.py") == ["calls"]


def test_every_file_that_a_record_depends_on_is_there():
    assert [
        path for paths in sources.SOURCES.values() for path in paths if not (sources.ROOT / path.partition(":")[0]).exists()
    ] == []


def test_the_lead_picture_and_that_of_the_norms_are_drawn_beside_their_records(folder):
    ablations.save(results.ablation(), folder / "nvidia-h200" / "ablation" / "gpt2")
    where = {"residual": "fp32", "weights": "fp32", "direction": "backward"}
    write(folder / "nvidia-h200" / "norms_models.json", norm("add_rms", 768, "ours", 0.9, **where))
    readme.draw(folder / "nvidia-h200")
    assert {path.name for path in (folder / "nvidia-h200").glob("*.png")} == {"lead.png", "norms_models.png"}
    said = rewritten("versions nvidia-h200", folder).splitlines()[3]
    assert said.startswith("Recorded with torch 2.11.0 and triton 3.6.0; `constraints.txt` pins 2.")


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
