"""The tables of README.md and docs/, and the links between pages."""

import json
import re
from dataclasses import replace
from itertools import chain

import pytest

from ablation import records as ablations
from benchmarks import readme
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
        "norm nvidia-h200": "no table 'norm'; there are norms_models, .*, headline and origin",
        "norms_models nvidia-h200 (768)": "not of the form",
    }.items():
        with pytest.raises(ValueError, match=message):
            rewritten(marker, folder)
    for marker, name in (("sites nvidia-h200", "sites"), ("ablation nvidia-h200 gpt2", "gpt2"), ("headline cpu gpt2", "gpt2")):
        assert f" yet: `python -m benchmarks.records {name}`" in rewritten(marker, folder)


def test_a_row_of_the_first_table_whose_cell_is_not_recorded_is_an_error(folder, monkeypatch):
    ablations.save(results.ablation(), folder / "nvidia-h200" / "ablation" / "gpt2")
    monkeypatch.setitem(readme.HEADLINE, ("gpt2", "graph"), "GPT-2 as a graph")
    with pytest.raises(ValueError, match=r"^'GPT-2 as a graph': the ablation gpt2 has no cell 'graph'"):
        rewritten("headline nvidia-h200 gpt2", folder)


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


def test_a_table_says_what_has_changed_since_by_record(folder, monkeypatch):
    monkeypatch.setattr(readme, "pins", lambda: {"torch": "2.11.0", "triton": "3.7.1"})
    file = folder / "nvidia-h200" / "norms_models.json"
    known = {"environment": ENVIRONMENT, "code": {"modules": {"ops/gone.py": "0"}}, "records": [norm("ln", 768, "ours", 0.9)]}
    file.write_text(json.dumps(known))
    said = ["Old: ops/gone.py has changed.", "Versions: triton 3.6.0 was measured, 3.7.1 is pinned."]
    assert [line for line in rewritten("norms_models nvidia-h200", folder).splitlines() if line[:3] in ("Old", "Ver")] == said
    write(file.with_name("host.json"))
    text = rewritten("origin nvidia-h200 norms_models host", folder)
    assert (
        "Old (norms_models): ops/gone.py has changed." in text
        and "Old (host): it does not say which code was measured." in text
    )


def test_figures_in_prose_are_those_of_the_rows_that_their_marker_names(folder):
    ablations.save(results.ablation(), folder / "nvidia-h200" / "ablation" / "gpt2")
    write(
        folder / "nvidia-h200" / "host.json", {"provider": "ours", "us": 37.4, "share": 0.981}, {"provider": "torch", "us": 1}
    )

    def shown(marker, record="host"):
        text = readme.rewritten(
            f"a <!-- figure: nvidia-h200 {record} {marker} -->old<!-- end --> b", folder / "README.md", folder
        )
        return re.fullmatch(r"a <!-- [^>]* -->(.*)<!-- end --> b", text)[1]

    assert shown("us:.0f provider=ours") == "37"
    assert shown("share:.0%") == "98 %" and shown("us") == "1 to 37.4", "of several rows the lowest to the highest"
    cell = results.ablation().cells[0]
    where = "mode=eager model.dropout=0.1 arm=fused"
    assert shown(f"ms:.2f {where}", "gpt2") == f"{spread([*chain(*cell.arms['fused'].blocks_ms)]).median:.2f}"
    speedup = interval_text(cell.against("compiled").speedup)
    assert shown(f"'over compiled:.3f' {where}", "gpt2") == speedup
    assert shown("us provider=ours", "losses") == "(not recorded yet)"
    with pytest.raises(
        ValueError, match=r"no row of .*host.json has these values and a field ms; fields are provider, us, share"
    ):
        shown("ms provider=ours")
    with pytest.raises(ValueError, match="not of the form <!-- figure: GPU RECORD FIELD"):
        readme.rewritten("<!-- figure: nvidia-h200 host us -->", folder / "README.md", folder)


def test_the_lead_picture_and_that_of_the_norms_are_drawn_beside_their_records(folder, monkeypatch):
    for name in readme.HEADLINED:
        ablations.save(results.ablation(), folder / "nvidia-h200" / "ablation" / name)
    monkeypatch.setattr(readme, "HEADLINE", {key: words for key, words in readme.HEADLINE.items() if key[0] == "gpt2"})
    names = ("traffic", "ours", "torch", "compile", "flash-attn", "liger-kernel", "quack-kernels")
    records = [norm("add_rms", n, name, 0.9, direction="backward", residual="fp32") for n in (1152, 4608) for name in names]
    write(folder / "nvidia-h200" / "norms_models.json", *records, norm("ln", 1024, "ours", 0.8))
    readme.draw(folder / "nvidia-h200")
    assert {path.name for path in (folder / "nvidia-h200").glob("*.png")} == {"lead.png", "norms_models.png"}


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
