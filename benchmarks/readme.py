"""Writes the tables and pictures of README.md and docs/ from recorded results.

python -m benchmarks.readme            rewrites tables, and draws the pictures beside their records
python -m benchmarks.readme --check    fails if a table is not what the records say

    <!-- benchmarks: ablation nvidia-h200 gpt2/model.dropout=0.1 llama -->
    anything here is replaced
    <!-- end of benchmarks -->

Words behind the GPU's name choose rows: of `norms_models` widths; of `ablation` and `headline` records, or of a record the
cells of this override or mode. `headline` has a line for each cell, before → after. `versions` is one sentence on the records
of a GPU. A page may name a record before it is there.

The line under a table names GPU, versions and revision, and says if what was measured has changed since (measure/sources.py).
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation import plots
from benchmarks import host, memory, report, scaling
from benchmarks.command import FOLDER
from measure.comparison import AGAIN, TORCH
from measure.sources import OF_RECORD, ROOT, fingerprints
from measure.statistics import Interval, Spread
from measure.tables import NOTHING, compact_markdown, interval_text, label, machine

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+)((?: [\w.=/-]+)*) -->\n).*?(<!-- end of benchmarks -->)", re.DOTALL)
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(("norms_models", "sites", "rotary", "losses"), report.markdown),
    "host": host.markdown,
    "memory": memory.markdown,
    "scaling": scaling.markdown,
}
PICTURED = ("gpt2", "llama")  # ablations in the lead picture
Cell = dict[str, Any]  # of a report.json
Environments = Mapping[str, dict[str, Any]]  # by record


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- ablations -------------------------------------------------------------------------------------------------------------


def arms_of(cell: Cell) -> list[str]:
    return [name for name in cell["arms"] if name not in (AGAIN, "nanogpt")]


def fastest(cell: Cell) -> str:
    """The fastest arm beside the subject, in a recorded cell."""
    return min((a for a in arms_of(cell) if a != cell["subject"]), key=lambda a: cell["arms"][a]["step_ms"]["median"])


def median(cell: Cell, arm: str) -> str:
    return f"{cell['arms'][arm]['step_ms']['median']:.2f}"


def speedup(cell: Cell, base: str, arm: str | None = None) -> Interval:
    return Interval(**cell["pairs"][base][arm or cell["subject"]]["speedup"])


def title_of(cell: Cell) -> str:
    return label(cell["overrides"], cell["mode"])


def cells_of(folder: Path, words: Sequence[str]) -> tuple[list[tuple[str, Cell]], dict[str, dict[str, Any]]]:
    """The cells of the ablations recorded in the folder, gpt2/, shakespeare_char/ …, and their environments, both by name. An
    environment says what of its record is `unfinished`."""
    found, environments = [], {}
    chosen = [word.partition("/")[::2] for word in words]
    for name, override in chosen or [(path.parent.name, "") for path in sorted(folder.glob("*/report.json"))]:
        record = load(folder / name / "report.json")
        environments[name] = record["environment"] | {"unfinished": record.get("unfinished")}
        cells = [cell for cell in record["cells"] if not override or override in title_of(cell).split(", ")]
        if not cells:
            raise ValueError(f"{folder / name} has no cell with {override}; choose another, or leave /{override} out")
        found += [(name, cell) for cell in cells]
    return found, environments


def ablation(cells: Sequence[tuple[str, Cell]], root: str) -> str:
    """A row for each cell. Links begin at `root`."""
    rows = []
    for name, cell in cells:
        other = fastest(cell)
        limit = NOTHING if cell["attribution"] is None else f"{cell['attribution']['limits'][other]:.3f}"
        row = [f"[{name}]({root}/{name}/report.md), {title_of(cell)}", median(cell, TORCH), f"{other}, {median(cell, other)}"]
        row += [median(cell, cell["subject"]), interval_text(speedup(cell, other))]
        row += [NOTHING if other == TORCH else interval_text(speedup(cell, TORCH)), interval_text(speedup(cell, TORCH, AGAIN))]
        rows.append([*row, limit])
    header = ["configuration", "torch ms", "fastest other arm, ms", "fused ms", "speed-up over it (95 %)", "over torch"]
    return compact_markdown([*header, "A/A (95 %)", "Amdahl limit"], rows)


def headline(cells: Sequence[tuple[str, Cell]]) -> str:
    """A line for each cell: before → after in ms, against the fastest other arm first."""
    lines = []
    for name, cell in cells:
        after = median(cell, cell["subject"])
        words = [
            f"against {base} {median(cell, base)} → {after} ms, {interval_text(speedup(cell, base))} ×"
            for base in dict.fromkeys((fastest(cell), TORCH))
        ]
        lines.append(f"- **{name}, {title_of(cell)}**: {'; '.join(words)}")
    return "\n".join(lines)


# ---- pages -----------------------------------------------------------------------------------------------------------------


def machines(environments: Environments) -> str:
    """GPU, versions and revisions of records by name. If revisions differ, each names its records."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, environment in environments.items():
        where, _, revision = machine(environment).rpartition(", git ")
        found.setdefault(where, {}).setdefault(revision, []).append(name)
    if len(found) == 1 and len(*found.values()) == 1:
        return machine(next(iter(environments.values())))
    named = {where: [f"{git} ({', '.join(names)})" for git, names in of.items()] for where, of in found.items()}
    return "; ".join(f"{where}, git {', '.join(of)}" for where, of in named.items())


def unfinished(environments: Environments) -> str:
    """Says which records were stopped before their end."""
    stopped = [f"{name} ({of['unfinished']})" for name, of in environments.items() if of.get("unfinished")]
    return f"Stopped before its end: {', '.join(stopped)}." if stopped else ""


def changed(name: str, environments: Environments) -> str:
    """Says of which records what was measured has changed since, by its sources; nothing if it has not.

    A record without fingerprints is older than they are.
    """
    what = OF_RECORD.get(name, "norms")
    now = fingerprints()[what]
    old = [record for record, environment in environments.items() if environment.get("sources", {}).get(what) != now]
    which = f" ({', '.join(old)})" if len(environments) > 1 else ""
    return f"Old: the measured code has changed since this was recorded{which}." if old else ""


def versions(folder: Path) -> str:
    """Which versions the records have, where constraints.txt pins others."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    paths = [*folder.glob("*.json"), *folder.glob("ablation/*/report.json")]
    known = [load(path)["environment"]["versions"] for path in paths]
    told = [f"{name} {' and '.join(sorted({of[name] for of in known if of.get(name)}))}" for name in ("torch", "triton")]
    return f"Recorded with {' and '.join(told)}; `constraints.txt` pins {pinned['torch']} and {pinned['triton']}."


def rewritten(text: str, page: Path, folder: Path = FOLDER) -> str:
    """The text of a page with new contents of every marked block.

    Raises:
        ValueError: a marker names a table or a row that is not there, or is not of the form.
        FileNotFoundError: it names an ablation that is not there.
    """
    root = Path(os.path.relpath(folder.resolve(), page.resolve().parent)).as_posix()

    def block(match: re.Match[str]) -> str:
        begin, name, gpu, words, end = match.groups()
        parts = content(name, folder / gpu, words.split(), f"{root}/{gpu}")
        return "\n\n".join([f"{begin}\n{parts[0]}", *filter(None, parts[1:]), end])

    new, count = BLOCK.subn(block, text)
    if text.count("<!-- benchmarks:") != count:
        raise ValueError(f"{page}: a marker has no end, or is not of the form <!-- benchmarks: TABLE GPU [ROWS …] -->")
    return new


def content(name: str, folder: Path, words: Sequence[str], root: str) -> list[str]:
    """A table, the machine in words, and whether it is old."""
    if name == "versions":
        return [versions(folder)]
    if name in ("ablation", "headline"):
        cells, environments = cells_of(folder / "ablation", words)
        table = ablation(cells, f"{root}/ablation") if name == "ablation" else headline(cells)
        return [table, machines(environments), unfinished(environments), changed("ablation", environments)]
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}, ablation, headline and versions")
    if not (folder / f"{name}.json").exists():
        return [f"Not recorded on {folder.name} yet: `python -m benchmarks.records {name}` records it."]
    file = load(folder / f"{name}.json")
    table = report.by_width(file, words) if words else TABLES[name](file)
    return [table, machine(file["environment"]), changed(name, {name: file["environment"]})]


def draw(folder: Path) -> None:
    """The pictures of all records of a GPU, beside them."""
    if there := [name for name in PICTURED if (folder / "ablation" / name / "report.json").exists()]:
        cells, environments = cells_of(folder / "ablation", there)
        cells.sort(key=lambda one: (there.index(one[0]), one[1]["mode"] != "eager", label(one[1]["overrides"])))
        bars = []
        for name, cell in cells:
            steps = {arm: Spread(**cell["arms"][arm]["step_ms"]) for arm in arms_of(cell)}
            of = {base: speedup(cell, base) for base in steps if base != cell["subject"]}
            bars.append(plots.Bars(f"{name}, {title_of(cell)}", steps, of))
        plots.lead(bars, folder / "lead.png", machines(environments), "A training step with each norm")
    if (folder / "norms_models.json").exists():
        report.plot(load(folder / "norms_models.json"), folder / "norms_models.png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table would change")
    check = parser.parse_args(argv).check
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, page, FOLDER)
        if new == text:
            continue
        if check:
            raise SystemExit(f"{page} is not what {FOLDER} says; run python -m benchmarks.readme")
        page.write_text(new, encoding="utf-8")
        print(f"written: {page}")
    if not check:
        for folder in sorted(path for path in FOLDER.iterdir() if path.is_dir()):
            draw(folder)


if __name__ == "__main__":
    main()
