"""The tables of README.md and docs/, and the links between pages."""

import json
import re
from dataclasses import replace
from itertools import chain

import pytest

from ablation import records as ablations
from benchmarks import readme, report
from measure import sources
from measure.statistics import spread
from measure.tables import interval_text
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


def test_recorded_ablations_have_a_row_for_each_cell_and_words_of_a_marker_choose_some(folder):
    found = results.ablation()
    other = replace(found, environment=found.environment | {"git": {"revision": "abcdef0123", "dirty": False}})
    ablations.save(found, folder / "nvidia-h200" / "ablation" / "gpt2")
    ablations.save(other, folder / "nvidia-h200" / "ablation" / "llama")
    revision = found.environment["git"]["revision"][:8]
    lines = rewritten("ablation nvidia-h200", folder).splitlines()
    assert any(line.endswith(f"git {revision} (gpt2), abcdef01 (llama)") for line in lines)
    rows = [line for line in lines if "report.md" in line]
    assert len(rows) == 2 * 4 and "eager, model.dropout=0.1 |" in rows[0] and "compiled, model.dropout=0.1 |" in rows[1]
    assert "[gpt2](results/nvidia-h200/ablation/gpt2/report.md)" in rows[0], "relative to the page"
    cell = found.cells[0]
    medians = {name: spread([*chain(*arm.blocks_ms)]).median for name, arm in cell.arms.items()}
    torch_ms, compiled_ms, fused_ms = (f"{medians[name]:.2f}" for name in ("torch", "compiled", "fused"))
    over_compiled, over_torch = (interval_text(cell.against(base).speedup) for base in ("compiled", "torch"))
    assert f"| {torch_ms} | compiled, {compiled_ms} | {fused_ms} | {over_compiled} | {over_torch} |" in rows[0]
    line = rewritten("headline nvidia-h200 gpt2", folder).splitlines()[6]
    figures = " | ".join((compiled_ms, fused_ms, over_compiled, over_torch))
    assert line == f"| GPT-2 124M, dropout 0.1, eager | {figures} | 8.50 of 39.70 |"
    text = rewritten("ablation nvidia-h200 llama", folder)
    assert [line for line in text.splitlines() if "report.md" in line] == rows[4:]


def test_a_table_is_old_once_the_sources_of_what_was_measured_differ_and_not_before(folder):
    def page(sources):
        file = folder / "nvidia-h200" / "norms_models.json"
        write(file, norm("add_ln", 768, "ours", 0.9, residual="fp32"), environment=ENVIRONMENT | {"sources": sources})
        return rewritten("norms_models nvidia-h200", folder)

    now = readme.fingerprints()
    assert "Old: " not in page(now | {"step": "another", "rotary": "another"}), "norms know neither the model nor other kernels"
    assert "Old: the measured code has changed since this was recorded." in page(now | {"norms": "another"})
    assert "Old: " in page({}), "recorded before there were fingerprints"


def test_fingerprints_change_with_the_files_that_what_is_measured_is_made_of_but_not_with_their_comments(tmp_path, monkeypatch):
    paths = [path.partition(":")[0] for of in sources.SOURCES.values() for path in of]
    assert [path for path in paths if not (sources.ROOT / path).exists()] == []
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    before = {}

    def changed_by(name, code="x = 1\n"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
        now = sources.fingerprints()
        changed = [what for what in now if now[what] != before.get(what)]
        before.update(now)
        return changed

    code = 'def f(x):\n    """One."""\n    # two\n\n    return "# 3" + x  # four\n'
    assert changed_by("ops/kernels/forward.py") == list(sources.SOURCES)
    assert changed_by("model/gpt.py", code) == ["step", "ranks"]
    assert changed_by("model/gpt.py", '# new\ndef f(x):\n    """Another."""\n    return "# 3" + x\n') == []
    assert changed_by("model/gpt.py", code.replace("# 3", "# 4")) == ["step", "ranks"]
    assert changed_by("ops/norm.py") == ["calls"]


def test_the_lead_picture_and_that_of_the_norms_are_drawn_beside_their_records(folder, monkeypatch):
    ablations.save(results.ablation(), folder / "nvidia-h200" / "ablation" / "gpt2")
    names, drawn = ("traffic", "ours", "torch", "compile", "flash-attn", "liger-kernel", "quack-kernels"), {}
    records = [norm("add_rms", n, name, 0.9, direction="backward", residual="fp32") for n in (1152, 4608) for name in names]
    write(folder / "nvidia-h200" / "norms_models.json", *records, norm("ln", 1024, "ours", 0.8))
    finish = report.finish
    monkeypatch.setattr(report, "finish", lambda figure, *of: drawn.update({finish(figure, *of): figure.axes[-1]}))
    readme.draw(folder / "nvidia-h200")
    assert {path.name for path in (folder / "nvidia-h200").glob("*.png")} == {"lead.png", "norms_models.png"}
    (axes,) = drawn.values()
    assert [of.get_label() for of in axes.containers] == ["fused (ours)", "torch.compile", "flash-attn", "Liger", "quack"]
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
