"""Writes the tables, figures and pictures of README.md and docs/ from recorded results.

python -m benchmarks.readme            rewrites tables and figures, and draws the pictures beside their records
python -m benchmarks.readme --check    fails if a table or a figure is not what the records say

    <!-- benchmarks: ablation nvidia-h200 gpt2 llama -->
    anything here is replaced
    <!-- end of benchmarks -->

Words behind the GPU's name choose records of `ablation` and `headline`, which has those of HEADLINE, in words. `origin` says
where the records that it names are from, for a page with figures of them. A page may name a record before it is there.

    one call takes <!-- figure: nvidia-h100 host us:.0f provider=ours direction=forward -->37<!-- end --> µs

A figure is a field of the rows of a record (`rows_of`) that have these values, in the format behind the colon; of several rows
it is the lowest to the highest. Words with spaces stand in quotes.

The line under a table names GPU, versions and revision, and says what has changed since (measure/sources.py). --check asks that
it says so of the modules, and not that it names all of them.
"""

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ablation import plots
from ablation.records import Recorded, controls, fastest, speedup, steps_of
from benchmarks import host, memory, report, scaling
from benchmarks.command import FOLDER
from measure.comparison import TORCH
from measure.environment import LIBRARIES
from measure.files import replace_text
from measure.sources import ROOT, changes, other_versions
from measure.tables import NOTHING, compact_markdown, interval_text, label, machine

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+)((?: \w+)*) -->\n).*?(<!-- end of benchmarks -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: ([\w-]+) (\w+) ([^>]+?) -->).*?(<!-- end -->)", re.DOTALL)
CHANGED = re.compile(r"^Old.* (has|have) changed\.$", re.MULTILINE)
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(
        ("norms_models", "norms_libraries", "sites", "rotary", "losses", "activation", "gated", "modulated"), report.markdown
    ),
    "adoption": report.adoption,
    "host": host.markdown,
    "memory": memory.markdown,
    "scaling": scaling.markdown,
}
HEADLINE = {  # what README shows: record and title of a cell, and its name in words
    ("gpt2", "compiled, model.dropout=0.1"): "GPT-2 124M, dropout 0.1, compiled",
    ("gpt2", "eager, model.dropout=0.1"): "GPT-2 124M, dropout 0.1, eager",
    ("llama", "compiled, model.qk_norm=False"): "Llama 114M, compiled",
    ("llama", "compiled, model.qk_norm=True"): "Llama 114M with QK-norm, compiled",
    ("shakespeare_char", "compiled graph"): "character model 10M, compiled, one CUDA graph",
    ("shakespeare_char", "compiled"): "character model 10M, compiled, no CUDA graph",
}
HEADLINED = list(dict.fromkeys(record for record, _ in HEADLINE))
Files = Mapping[str, dict[str, Any]]  # results, by the name of their record


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def path_of(folder: Path, name: str) -> Path:
    """The file of a record, which may not be there."""
    inside = [folder / of / name / "report.json" for of in ("ablation", "study")]
    return next((path for path in inside if path.exists()), folder / f"{name}.json")


# ---- ablations -------------------------------------------------------------------------------------------------------------


def ablations_in(folder: Path) -> list[str]:
    """The names of a GPU's ablations, but for those of several processes."""
    return [path.parent.name for path in sorted(folder.glob("ablation/*/report.json")) if "cells" in load(path)]


def cells_of(files: Files) -> list[tuple[str, Recorded]]:
    """With the names of their records."""
    return [(name, cell) for name, file in files.items() for cell in file["cells"]]


def title_of(cell: Recorded) -> str:
    return label(cell["overrides"], cell["mode"])


def ablation(files: Files, root: str) -> str:
    """A row for each cell. Links begin at `root`."""
    rows = []
    for name, cell in cells_of(files):
        ms, other = {arm: f"{of.median:.2f}" for arm, of in steps_of(cell).items()}, fastest(cell)
        limits = (cell["attribution"] or {"limits": {}})["limits"]
        rows.append([
            f"[{name}]({root}/ablation/{name}/report.md), {title_of(cell)}",
            ms[TORCH],
            f"{other}, {ms[other]}",
            ms[cell["subject"]],
            gain_over(other, cell),
            NOTHING if other == TORCH else interval_text(speedup(cell, TORCH)),
            " and ".join(map(interval_text, controls(cell))),
            f"{limit:.3f}" if (limit := limits.get(other)) else NOTHING,
        ])  # fmt: skip
    header = ["configuration", "torch ms", "fastest other arm, ms", "fused ms", "speed-up over it (95 %)", "over torch"]
    return compact_markdown([*header, "A/A (95 %)", "Amdahl limit"], rows)


def headline(files: Files, _: str) -> str:
    """A row for each cell of HEADLINE: milliseconds, what the subject gains, and the memory that it saves."""
    rows = []
    for words, cell in named(files).items():
        ms, other = {arm: f"{of.median:.2f}" for arm, of in steps_of(cell).items()}, fastest(cell)
        peak, least = (cell["arms"][arm]["peak_gb"] for arm in (other, cell["subject"]))
        rows.append([
            words,
            ms[other],
            ms[cell["subject"]],
            gain_over(other, cell),
            NOTHING if other == TORCH else interval_text(speedup(cell, TORCH)),
            NOTHING if peak is None else f"{round(peak - least, 2) + 0.0:.2f} of {peak:.2f}".replace("-", "−"),
        ])  # fmt: skip
    header = ["a training step", "fastest with PyTorch's norms, ms", "with fused norms, ms", "times as fast (95 %)"]
    return compact_markdown([*header, "over norms that are not compiled", "GiB saved"], rows)


def gain_over(other: str, cell: Recorded) -> str:
    """What the subject gains over the fastest other arm, as its verdict has it."""
    undecided = "undecided: " if cell["verdict"].startswith("no difference found") else ""
    return undecided + interval_text(speedup(cell, other))


def named(files: Files) -> dict[str, Recorded]:
    """The cells of HEADLINE, by their names in words. Raises ValueError: one of these records lacks one."""
    found = {(name, title_of(cell)): cell for name, cell in cells_of(files)}
    of = {words: key for key, words in HEADLINE.items() if key[0] in files}
    for words, key in of.items():
        if key not in found:
            raise ValueError(f"{words!r}: the ablation {key[0]} has no cell {key[1]!r}. Record it, or correct HEADLINE.")
    return {words: found[key] for words, key in of.items()}


# ---- pages -----------------------------------------------------------------------------------------------------------------


def origin(files: Files) -> list[str]:
    """Of a table: GPU, versions and revisions of its records; which were stopped before their end; what makes them
    old, and versions that are not those pinned."""
    where: dict[str, dict[str, list[str]]] = {}  # by GPU and versions: by revision, the records
    notes: dict[str, dict[str, list[str]]] = {}
    for record, file in files.items():
        gpu, _, revision = machine(file["environment"]).rpartition(", git ")
        where.setdefault(gpu, {}).setdefault(revision, []).append(record)
        said = {"Stopped before its end": file.get("unfinished"), "Old": changes(file)}
        for kind, words in (said | {"Versions": "; ".join(other_versions(file, pins(), "pinned"))}).items():
            if words:
                notes.setdefault(kind, {}).setdefault(words, []).append(record)

    def told(words: str, records: list[str]) -> str:
        return f"{words} ({', '.join(records)})" if len(records) < len(files) else words

    return [
        "; ".join(f"{gpu}, git {', '.join(told(*one) for one in of.items())}" for gpu, of in where.items()),
        *(f"{told(kind, records)}: {words}." for kind, of in notes.items() for words, records in of.items()),
    ]


def pins() -> dict[str, str]:
    """The versions in constraints.txt of what is measured."""
    found = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {name: of for name, of in found.items() if name in ("torch", "triton", *LIBRARIES)}


def rewritten(text: str, page: Path, folder: Path) -> str:
    """The text of a page with new contents of every marked block, and every figure.

    Raises:
        ValueError: a marker names a table or a figure that is not there, or is not of the form; or a record lacks a row.
    """
    root = Path(os.path.relpath(folder.resolve(), page.resolve().parent)).as_posix()

    def block(match: re.Match[str]) -> str:
        begin, name, gpu, words, end = match.groups()
        return "\n\n".join([begin + "\n" + content(name, folder / gpu, words.split(), f"{root}/{gpu}"), end])

    for pattern, replace, form in (
        (BLOCK, block, "benchmarks: TABLE GPU [ROWS …]"),
        (FIGURE, lambda match: figure(match, folder), "figure: GPU RECORD FIELD[:FORMAT] [KEY=VALUE …]"),
    ):
        marker = f"<!-- {form.partition(' ')[0]}"
        text, count = pattern.subn(replace, text)
        if text.count(marker) != count:
            raise ValueError(f"{page}: a marker has no end, or is not of the form <!-- {form} -->")
    return text


def content(name: str, folder: Path, words: Sequence[str], root: str) -> str:
    """A table, and where it is from."""
    several = {"ablation": ablation, "headline": headline, "origin": lambda *_: ""}
    if name not in TABLES | several:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}, ablation, headline and origin")
    without_words = {"ablation": ablations_in(folder), "headline": HEADLINED}.get(name, [])
    records = [name] if name in TABLES else words or without_words
    files = {record: load(path) for record in records if (path := path_of(folder, record)).exists()}
    if missing := [record for record in records if record not in files]:
        return f"Not recorded on {folder.name} yet: `python -m benchmarks.records {' '.join(missing)}`."
    table = several[name](files, root) if name in several else TABLES[name](files[name])
    return "\n\n".join(filter(None, [table, *origin(files)]))


# ---- figures ---------------------------------------------------------------------------------------------------------------


def figure(match: re.Match[str], folder: Path) -> str:
    """A marker and its end, and the figure between them."""
    begin, gpu, record, words, end = match.groups()
    if not (path := path_of(folder / gpu, record)).exists():
        return f"{begin}(not recorded yet){end}"
    field, *keys = shlex.split(words)
    name, _, form = field.partition(":")
    wanted = dict(key.split("=", 1) for key in keys)
    rows = [row for row in rows_of(load(path)) if all(str(row.get(key)) == value for key, value in wanted.items())]
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        there = ", ".join(dict.fromkeys(chain(*rows_of(load(path)))))
        raise ValueError(f"{begin}: no row of {path} has these values and a field {field}; fields are {there}")

    def shown(value: Any) -> str:
        if isinstance(value, list):  # a median and its interval
            middle, low, high = map(shown, value)
            return f"{middle} ({low} to {high})"
        return value if isinstance(value, str) else format(value, form or ".3g")

    ends = [min(values), max(values)] if len(values) > 1 else values
    if isinstance(values[0], list) and len(values) > 1:
        ends = [min(values)[0], max(values)[0]]
    told = " to ".join(dict.fromkeys(map(shown, ends))).replace("-", "−").replace("%", " %")
    return f"{begin}{told}{end}"


def rows_of(file: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of a benchmark. Of an ablation a row for each arm of each cell: mode, swept keys, arm, ms, p10, p90, peak_gb,
    launches, `over BASE` with its interval, the ms of each kind of work, and for an opponent the limit."""
    if "records" in file:
        return file["records"]
    found = []
    for cell in file.get("cells", ()):
        for name, arm in cell["arms"].items():
            times = {at: arm["step_ms"][key] for at, key in (("ms", "median"), ("p10", "p10"), ("p90", "p90"))}
            row = {"mode": cell["mode"], **cell["overrides"], "arm": name, **times}
            row |= {"peak_gb": arm["peak_gb"], "launches": arm["launches"]}
            pairs = {base: of[name]["speedup"] for base, of in cell["pairs"].items() if name in of}
            row |= {f"over {base}": [speedup[at] for at in ("median", "low", "high")] for base, speedup in pairs.items()}
            if shares := cell["attribution"]:
                row |= {of["group"]: of["ms"] for of in shares["shares"].get(name, ())} | {"limit": shares["limits"].get(name)}
            found.append(row)
    return found


# ---- pictures --------------------------------------------------------------------------------------------------------------


def draw(folder: Path) -> None:
    """The pictures of all records of a GPU, beside them."""
    paths = [path_of(folder, name) for name in HEADLINED]
    if all(path.exists() for path in paths):
        files = dict(zip(HEADLINED, map(load, paths), strict=True))
        plots.lead(named(files), folder / "lead.png", origin(files)[0], "A training step with each norm")
    if (folder / "norms_models.json").exists():
        report.plot(load(folder / "norms_models.json"), folder / "norms_models.png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table or a figure would change")
    check = parser.parse_args(argv).check
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, page, FOLDER)
        if check and CHANGED.sub("Old", new) != CHANGED.sub("Old", text):
            raise SystemExit(f"{page} is not what {FOLDER} says; run python -m benchmarks.readme")
        if not check:
            replace_text(page, new)
    if not check:
        for folder in FOLDER.iterdir():
            draw(folder)


if __name__ == "__main__":
    main()
