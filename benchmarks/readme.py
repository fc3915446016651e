"""Writes the tables and pictures of README.md and docs/ from recorded results.

python -m benchmarks.readme            rewrites tables, and draws the pictures beside their records
python -m benchmarks.readme --check    fails if a table is not what the records say

    <!-- benchmarks: norms_models nvidia-h200 1152 2304 -->
    anything here is replaced
    <!-- end of benchmarks -->

Words behind the GPU's name choose rows: of `norms_models` widths, of `ablation` and `headline` records. `headline` has a line
for each cell of an ablation, before → after. `versions` is one sentence on the records of a GPU. A page may name a record
before it is there.

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
from benchmarks import host, memory, report, scaling, study_errors
from benchmarks.command import FOLDER
from measure.comparison import TORCH, TWIN, is_twin
from measure.files import replace_text
from measure.sources import OF_RECORD, ROOT, fingerprints
from measure.statistics import Interval, Spread
from measure.tables import NOTHING, compact_markdown, interval_text, label, machine

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+)((?: \w+)*) -->\n).*?(<!-- end of benchmarks -->)", re.DOTALL)
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(("norms_models", "sites", "rotary", "losses", "activation", "modulated"), report.markdown),
    "host": host.markdown,
    "memory": memory.markdown,
    "scaling": scaling.markdown,
    "study_errors": study_errors.markdown,
}
PICTURED = ("gpt2", "llama")  # ablations in the lead picture
Cell = dict[str, Any]  # of a report.json
Environments = Mapping[str, dict[str, Any]]  # by record


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# ---- ablations -------------------------------------------------------------------------------------------------------------


def cells_of(folder: Path, names: Sequence[str]) -> tuple[list[tuple[str, Cell]], dict[str, dict[str, Any]]]:
    """The cells of these ablations, or of all in the folder, and their environments, both by name. An environment says what of
    its record is `unfinished`."""
    found, environments = [], {}
    for name in names or sorted(path.parent.name for path in folder.glob("*/report.json")):
        record = load(folder / name / "report.json")
        environments[name] = record["environment"] | {"unfinished": record.get("unfinished")}
        found += [(name, cell) for cell in record["cells"]]
    return found, environments


def steps_of(cell: Cell) -> dict[str, Spread]:
    """The step times of norms' implementations."""
    return {name: Spread(**of["step_ms"]) for name, of in cell["arms"].items() if name != "nanogpt" and not is_twin(name)}


def fastest(cell: Cell) -> str:
    """The fastest arm beside the subject."""
    steps = steps_of(cell)
    return min((name for name in steps if name != cell["subject"]), key=lambda name: steps[name].median)


def speedup(cell: Cell, base: str, arm: str = "") -> Interval:
    """Of an arm, by default the subject."""
    return Interval(**cell["pairs"][base][arm or cell["subject"]]["speedup"])


def title_of(cell: Cell) -> str:
    return label(cell["overrides"], cell["mode"])


def ablation(cells: Sequence[tuple[str, Cell]], root: str) -> str:
    """A row for each cell. Links begin at `root`."""
    rows = []
    for name, cell in cells:
        ms, other = {arm: f"{of.median:.2f}" for arm, of in steps_of(cell).items()}, fastest(cell)
        rows.append([
            f"[{name}]({root}/{name}/report.md), {title_of(cell)}",
            ms[TORCH],
            f"{other}, {ms[other]}",
            ms[cell["subject"]],
            interval_text(speedup(cell, other)),
            NOTHING if other == TORCH else interval_text(speedup(cell, TORCH)),
            " and ".join(interval_text(speedup(cell, b, b + TWIN)) for b, of in cell["pairs"].items() if b + TWIN in of),
            NOTHING if cell["attribution"] is None else f"{cell['attribution']['limits'][other]:.3f}",
        ])  # fmt: skip
    header = ["configuration", "torch ms", "fastest other arm, ms", "fused ms", "speed-up over it (95 %)", "over torch"]
    return compact_markdown([*header, "A/A (95 %)", "Amdahl limit"], rows)


def headline(cells: Sequence[tuple[str, Cell]]) -> str:
    """A row for each cell: milliseconds of the arms, and what the subject gains over them."""
    rows = []
    for name, cell in cells:
        ms = {arm: f"{of.median:.2f}" for arm, of in steps_of(cell).items()}
        gains = [interval_text(speedup(cell, base)) if base in ms else NOTHING for base in ("compiled", TORCH)]
        rows.append([f"{name}, {title_of(cell)}", ms[TORCH], ms.get("compiled", NOTHING), ms[cell["subject"]], *gains])
    header = ["a step, ms", "torch", "compiled norm", "fused", "fused over compiled norm", "fused over torch"]
    return compact_markdown(header, rows)


# ---- pages -----------------------------------------------------------------------------------------------------------------


def origin(name: str, environments: Environments) -> list[str]:
    """Of a table: GPU, versions and revisions of its records; which were stopped before their end; of which what was measured
    has changed since, by its sources. A record without fingerprints is older than they are."""
    found: dict[str, dict[str, list[str]]] = {}
    for record, environment in environments.items():
        where, _, revision = machine(environment).rpartition(", git ")
        found.setdefault(where, {}).setdefault(revision, []).append(record)
    several = len(found) > 1 or len(*found.values()) > 1
    named = [
        f"{where}, git " + ", ".join(git + (f" ({', '.join(records)})" if several else "") for git, records in of.items())
        for where, of in found.items()
    ]
    stopped = [f"{record} ({of['unfinished']})" for record, of in environments.items() if of.get("unfinished")]
    what = OF_RECORD.get(name, "norms")
    now = fingerprints()[what]
    old = [record for record, of in environments.items() if of.get("sources", {}).get(what) != now]
    which = f" ({', '.join(old)})" if len(environments) > 1 else ""
    return [
        "; ".join(named),
        *([f"Stopped before its end: {', '.join(stopped)}."] if stopped else []),
        *([f"Old: the measured code has changed since this was recorded{which}."] if old else []),
    ]


def versions(folder: Path) -> str:
    """Which versions the records have, where constraints.txt pins others."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    paths = [*folder.glob("*.json"), *folder.glob("ablation/*/report.json")]
    known = [load(path)["environment"]["versions"] for path in paths]
    told = [f"{name} {' and '.join(sorted({of[name] for of in known if of.get(name)}))}" for name in ("torch", "triton")]
    return f"Recorded with {' and '.join(told)}; `constraints.txt` pins {pinned['torch']} and {pinned['triton']}."


def rewritten(text: str, page: Path, folder: Path) -> str:
    """The text of a page with new contents of every marked block.

    Raises:
        ValueError: a marker names a table that is not there, or is not of the form.
        FileNotFoundError: it names an ablation that is not there.
    """
    root = Path(os.path.relpath(folder.resolve(), page.resolve().parent)).as_posix()

    def block(match: re.Match[str]) -> str:
        begin, name, gpu, words, end = match.groups()
        return "\n\n".join([begin + "\n" + content(name, folder / gpu, words.split(), f"{root}/{gpu}"), end])

    new, count = BLOCK.subn(block, text)
    if text.count("<!-- benchmarks:") != count:
        raise ValueError(f"{page}: a marker has no end, or is not of the form <!-- benchmarks: TABLE GPU [ROWS …] -->")
    return new


def content(name: str, folder: Path, words: Sequence[str], root: str) -> str:
    """A table, and where it is from."""
    if name == "versions":
        return versions(folder)
    if name in ("ablation", "headline"):
        cells, environments = cells_of(folder / "ablation", words)
        table = ablation(cells, f"{root}/ablation") if name == "ablation" else headline(cells)
        return "\n\n".join([table, *origin("ablation", environments)])
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}, ablation, headline and versions")
    if not (folder / f"{name}.json").exists():
        return f"Not recorded on {folder.name} yet: `python -m benchmarks.records {name}` records it."
    file = load(folder / f"{name}.json")
    table = report.by_width(file, words) if words else TABLES[name](file)
    return "\n\n".join([table, *origin(name, {name: file["environment"]})])


def draw(folder: Path) -> None:
    """The pictures of all records of a GPU, beside them."""
    if there := [name for name in PICTURED if (folder / "ablation" / name / "report.json").exists()]:
        cells, environments = cells_of(folder / "ablation", there)
        cells.sort(key=lambda one: (there.index(one[0]), one[1]["mode"] != "eager", label(one[1]["overrides"])))
        bars = []
        for name, cell in cells:
            steps = steps_of(cell)
            of = {base: speedup(cell, base) for base in steps if base != cell["subject"]}
            bars.append(plots.Bars(f"{name}, {title_of(cell)}", steps, of))
        plots.lead(bars, folder / "lead.png", origin("ablation", environments)[0], "A training step with each norm")
    if (folder / "norms_models.json").exists():
        report.plot(load(folder / "norms_models.json"), folder / "norms_models.png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table would change")
    check = parser.parse_args(argv).check
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text, page, FOLDER)
        if new != text and check:
            raise SystemExit(f"{page} is not what {FOLDER} says; run python -m benchmarks.readme")
        replace_text(page, new)
    if not check:
        for folder in FOLDER.iterdir():
            draw(folder)


if __name__ == "__main__":
    main()
