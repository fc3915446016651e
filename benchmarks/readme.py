"""Writes the tables and pictures of README.md and docs/ from recorded results.

python -m benchmarks.readme            rewrites tables, and draws the pictures beside their records
python -m benchmarks.readme --check    fails if a table is not what the records say

    <!-- benchmarks: ablation nvidia-h200 gpt2/model.dropout=0.1 llama -->
    anything here is replaced
    <!-- end of benchmarks -->

Words behind the GPU's name choose rows: of `norms_models` widths; of `ablation` and `headline` records, or of a record the
cells of this override or mode. `headline` has a line for each cell, before → after. `versions` is one sentence on the records
of a GPU. The block of `sites`, `rotary` or `losses` has its picture too, and says so where that is not recorded.

The line under a table names GPU, versions and revision, and says if what was measured has changed since (measure/sources.py).
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ablation import plots
from benchmarks import host, memory, report, scaling
from benchmarks.command import FOLDER
from benchmarks.report import ResultsError
from measure.comparison import AGAIN, TORCH
from measure.sources import OF_RECORD, ROOT, fingerprints
from measure.statistics import Interval, Spread
from measure.tables import NOTHING, compact_markdown, interval_text, label, machine

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+)((?: [\w.=/-]+)*) -->\n).*?(<!-- end of benchmarks -->)", re.DOTALL)
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **dict.fromkeys(report.PICTURED, report.shares_markdown),
    "host": host.markdown,
    "memory": memory.markdown,
    "scaling": scaling.markdown,
}
# Records whose block has the picture in it too, and which a page may name before they are there.
OWN_PICTURE = {
    "sites": "norm+add+norm, backward",
    "rotary": "RMSNorm and rotary positions, backward",
    "losses": "cross-entropy, forward and backward",
}
Cell = dict[str, Any]  # of a report.json

# ---- ablations -------------------------------------------------------------------------------------------------------------


def fastest(cell: Cell) -> str:
    """The fastest arm beside the subject, in a recorded cell."""
    others = [name for name in cell["arms"] if name not in (AGAIN, cell["subject"], "nanogpt")]
    return min(others, key=lambda name: cell["arms"][name]["step_ms"]["median"])


def median(cell: Cell, arm: str) -> str:
    return f"{cell['arms'][arm]['step_ms']['median']:.2f}"


def speedup(cell: Cell, base: str, arm: str | None = None) -> str:
    return interval_text(Interval(**cell["pairs"][base][arm or cell["subject"]]["speedup"]))


def cells_of(folder: Path, words: Sequence[str]) -> tuple[list[tuple[str, Cell]], dict[str, dict[str, Any]]]:
    """The cells of the ablations recorded in the folder, gpt2/, shakespeare_char/ …, and their environments, both by name. An
    environment says what of its record is `unfinished`."""
    found, environments = [], {}
    chosen = [word.partition("/")[::2] for word in words]
    for name, override in chosen or [(path.parent.name, "") for path in sorted(folder.glob("*/report.json"))]:
        path = folder / name / "report.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        environments[name] = record["environment"] | {"unfinished": record.get("unfinished")}
        cells = [c for c in record["cells"] if not override or override in label(c["overrides"], c["mode"]).split(", ")]
        if not cells:
            raise ResultsError(f"{path} has no cell with {override}; choose another, or leave /{override} out of the marker")
        found += [(name, cell) for cell in cells]
    if not found:
        raise ResultsError(f"{folder} has no report.json; record an ablation there, or remove the marker")
    return found, environments


def ablation(cells: Sequence[tuple[str, Cell]], root: str) -> str:
    """A row for each cell. Links begin at `root`."""
    rows = []
    for name, cell in cells:
        other = fastest(cell)
        limit = NOTHING if cell["attribution"] is None else f"{cell['attribution']['limits'][other]:.3f}"
        row = [f"[{name}]({root}/{name}/report.md), {label(cell['overrides'], cell['mode'])}"]
        row += [median(cell, TORCH), f"{other}, {median(cell, other)}", median(cell, cell["subject"]), speedup(cell, other)]
        row += [NOTHING if other == TORCH else speedup(cell, TORCH), speedup(cell, TORCH, AGAIN), limit]
        rows.append(row)
    header = ["configuration", "torch ms", "fastest other arm, ms", "fused ms", "speed-up over it (95 %)", "over torch"]
    return compact_markdown([*header, "A/A (95 %)", "Amdahl limit"], rows)


def headline(cells: Sequence[tuple[str, Cell]]) -> str:
    """A line for each cell: before → after in ms, against the fastest other arm first."""
    lines = []
    for name, cell in cells:
        other, subject = fastest(cell), cell["subject"]
        words = [
            f"against {base} {median(cell, base)} → {median(cell, subject)} ms, {speedup(cell, base)} ×"
            for base in dict.fromkeys((other, TORCH))
        ]
        lines.append(f"- **{name}, {label(cell['overrides'], cell['mode'])}**: {'; '.join(words)}")
    return "\n".join(lines)


def groups(folder: Path, names: Sequence[str]) -> tuple[list[plots.Bars], str]:
    """The recorded ablations that are there, for the lead picture, and the machine in words."""
    found, environments = cells_of(folder, [name for name in names if (folder / name / "report.json").exists()])
    bars = []
    for name, cell in sorted(
        found, key=lambda one: (names.index(one[0]), one[1]["mode"] != "eager", label(one[1]["overrides"]))
    ):
        arms = [arm for arm in cell["arms"] if arm not in (AGAIN, "nanogpt")]
        steps = {arm: Spread(**cell["arms"][arm]["step_ms"]) for arm in arms}
        of = {base: Interval(**cell["pairs"][base][cell["subject"]]["speedup"]) for base in arms if base != cell["subject"]}
        bars.append(plots.Bars(f"{name}, {label(cell['overrides'], cell['mode'])}", steps, of))
    return bars, machines(environments)


def machines(environments: dict[str, dict[str, Any]]) -> str:
    """GPU, versions and revision of ablations by name. If they differ, each revision names its rows."""
    names: dict[str, list[str]] = {}
    for name, environment in environments.items():
        names.setdefault(machine(environment), []).append(name)
    if len(names) == 1:
        return next(iter(names))
    revisions: dict[str, list[str]] = {}
    for line, of in names.items():
        where, _, revision = line.rpartition(", git ")
        revisions.setdefault(where, []).append(f"{revision} ({', '.join(of)})")
    return "; ".join(f"{where}, git {', '.join(of)}" for where, of in revisions.items())


# ---- pages -----------------------------------------------------------------------------------------------------------------


def unfinished(environments: dict[str, dict[str, Any]]) -> str:
    """Says which records were stopped before their end."""
    stopped = [f"{name} ({of['unfinished']})" for name, of in environments.items() if of["unfinished"]]
    return f"Stopped before its end: {', '.join(stopped)}." if stopped else ""


def changed(name: str, environments: dict[str, dict[str, Any]]) -> str:
    """Says of which records what was measured has changed since, by its sources; nothing if it has not.

    A record without fingerprints is older than they are.
    """
    what = OF_RECORD.get(name, "norms")
    now = fingerprints()[what]
    old = [record for record, environment in environments.items() if environment.get("sources", {}).get(what) != now]
    of = {"calls": "operators have", "step": "code of a training step has", "ranks": "code of a training step has"}
    which = f" ({', '.join(old)})" if len(environments) > 1 else ""
    return f"Old: the {of.get(what, 'kernels have')} changed since this was recorded{which}." if old else ""


def versions(folder: Path) -> str:
    """Which versions the records have, where constraints.txt pins others."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    used: dict[str, set[str]] = {"torch": set(), "triton": set()}
    for path in [*sorted(folder.glob("*.json")), *sorted(folder.glob("ablation/*/report.json"))]:
        known = json.loads(path.read_text(encoding="utf-8"))["environment"]["versions"]
        for name, of in used.items():
            of |= {known[name]} if known.get(name) else set()
    told = [f"{name} {' and '.join(sorted(of))}" for name, of in used.items()]
    return f"Recorded with {' and '.join(told)}; `constraints.txt` pins {pinned['torch']} and {pinned['triton']}."


def rewritten(text: str, page: Path, folder: Path = FOLDER) -> str:
    """The text of a page with new contents of every marked block.

    Raises:
        ResultsError: a marker names a table or a row that is not there.
        FileNotFoundError: it names a record that is not there.
    """
    root = Path(os.path.relpath(folder.resolve(), page.resolve().parent)).as_posix()

    def block(match: re.Match[str]) -> str:
        begin, name, gpu, words, end = match.groups()
        parts = content(name, folder / gpu, words.split(), f"{root}/{gpu}")
        return "\n\n".join([f"{begin}\n{parts[0]}", *filter(None, parts[1:]), end])

    new, count = BLOCK.subn(block, text)
    if text.count("<!-- benchmarks:") != count:
        raise ResultsError("a marker has no end, or is not of the form <!-- benchmarks: TABLE GPU [ROWS …] -->")
    return new


def content(name: str, folder: Path, words: Sequence[str], root: str) -> list[str]:
    """A table, the machine in words, and whether it is old."""
    if name == "versions":
        return [versions(folder)]
    if name in ("ablation", "headline"):
        cells, environments = cells_of(folder / "ablation", words)
        table = ablation(cells, f"{root}/ablation") if name == "ablation" else headline(cells)
        return [table, machines(environments), unfinished(environments), changed("ablation", environments)]
    path = folder / f"{name}.json"
    if name not in TABLES:
        raise ResultsError(f"there is no table {name!r}; there are {', '.join(TABLES)}, ablation, headline and versions")
    if name in OWN_PICTURE and folder.is_dir() and not path.exists():
        return [f"Not recorded on {folder.name} yet: `python -m benchmarks.records {name}` records it."]
    file = json.loads(path.read_text(encoding="utf-8"))
    table = report.by_width(file, words) if words else TABLES[name](file)
    parts = [table, machine(file["environment"]), changed(name, {name: file["environment"]})]
    return [*parts, f"![{OWN_PICTURE[name]}: % of copy bandwidth]({root}/{name}.png)"] if name in OWN_PICTURE else parts


def draw(folder: Path) -> list[Path]:
    """The pictures of all records of a GPU, beside them."""
    drawn = []
    if list(folder.glob("ablation/*/report.json")):
        bars, footer = groups(folder / "ablation", ("gpt2", "llama"))
        plots.lead(bars, folder / "lead.png", footer, "A training step with each norm")
        drawn.append(folder / "lead.png")
    for path in (folder / f"{name}.json" for name in report.PICTURED):
        if path.exists() and report.plot_shares(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png")):
            drawn.append(path.with_suffix(".png"))
    return drawn


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table would change")
    parser.add_argument("--readme", type=Path, nargs="+", default=PAGES, help="pages (README.md and docs/*.md)")
    parser.add_argument("--results", type=Path, default=FOLDER, help="(benchmarks/results)")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    for page in options.readme:
        text = page.read_text(encoding="utf-8")
        try:
            new = rewritten(text, page, options.results)
        except (ResultsError, FileNotFoundError) as error:
            raise SystemExit(f"{page}: {error}") from error
        if options.check and new != text:
            raise SystemExit(f"{page} is not what {options.results} says; run python -m benchmarks.readme")
        if new != text:
            page.write_text(new, encoding="utf-8")
        print(f"{page}: {'as it was' if new == text else 'written'}, by {options.results}")
    if not options.check:
        for folder in sorted(path for path in options.results.iterdir() if path.is_dir()):
            for picture in draw(folder):
                print(f"picture: {picture}")


if __name__ == "__main__":
    main()
