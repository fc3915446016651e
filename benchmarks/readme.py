"""Writes the tables of README.md and docs/ from recorded results, between markers that name what goes there.

python -m benchmarks.readme            rewrites
python -m benchmarks.readme --check    fails if a table is not what the records say

    <!-- benchmarks: norms nvidia-h200 -->
    anything here is replaced
    <!-- end of benchmarks -->

Words behind the GPU's name choose rows: `norms nvidia-h200 768 4096` these widths, a row each, and
`ablation nvidia-h200 llama gpt2/model.dropout=0.1` these records, or of a record the cells with this override.

The line under a table names GPU, versions and revision; of several revisions each names its rows, or counts its measurements. A
second line says which code has been committed since.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import host, memory, published, report, training_tables
from benchmarks.cases import CASES, DIRECTIONS, MODEL_WIDTHS
from benchmarks.command import FOLDER, Record, ResultsError, load, revision_of
from measure.comparison import FUSED, TORCH
from measure.statistics import Interval
from measure.tables import NOTHING, compact_markdown, interval_text, label, machine, measured_at

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+)((?: [\w.=/-]+)*) -->\n)(.*?)(<!-- end of benchmarks -->)", re.DOTALL)
NAMED_WIDTHS = {768: "GPT-2", 1600: "GPT-2 XL", 2048: "Llama 3.2 1B", 4096: "Llama 3 8B"} | MODEL_WIDTHS


def by_width(records: Sequence[Record], widths: Sequence[str], stream: str = "fp32") -> str:
    """Add + norm in both directions, ours and the best peer: a row for each width that a model has; of the most rows."""
    most = next(iter(report.by_rows(records).values()), [])
    cases = {key: found for key, found in report.grouped(most).items() if key[0] in ("add_ln", "add_rms") and key[2] == stream}
    columns = sorted(cases, key=lambda key: (key[0], DIRECTIONS.index(key[1])))
    rows = []
    measured = {width for found in cases.values() for width in found}
    if missing := [width for width in widths if width not in map(str, measured)]:
        known = ", ".join(map(str, sorted(measured)))
        raise ResultsError(
            f"no add + norm of width {', '.join(missing)} is recorded with a stream in {stream}; there are {known}"
        )
    for width in map(int, widths):
        cells = (report.norms_cell(cases[key].get(width, {})) for key in columns)
        rows.append([f"{width}, {NAMED_WIDTHS[width]}" if width in NAMED_WIDTHS else str(width), *cells])
    return compact_markdown(["hidden size", *(f"{CASES[key[0]].label} {key[1]}" for key in columns)], rows)


def ablation(folder: Path, words: Sequence[str], root: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """A row for each cell of the ablations recorded in the folder, gpt2/, shakespeare_char/ …, and their environments by name.

    Links begin at `root`.
    """
    rows, environments = [], {}
    chosen = dict(word.partition("/")[::2] for word in words)
    for name in chosen or sorted(path.parent.name for path in folder.glob("*/report.json")):
        path = folder / name / "report.json"
        if not path.exists():
            raise ResultsError(
                f"{path.parent} has no report.json; record that ablation there, or leave {name} out of the marker"
            )
        found = json.loads(path.read_text(encoding="utf-8"))
        environments[name] = found["environment"]
        override = chosen.get(name)
        cells = [cell for cell in found["cells"] if not override or override in label(cell["overrides"]).split(", ")]
        if not cells:
            raise ResultsError(
                f"{path.parent} has no cell with {override}; choose another, or leave /{override} out of the marker"
            )
        for cell in cells:
            torch, fused = (cell["arms"][arm]["step_ms"]["median"] for arm in (TORCH, FUSED))
            bound = NOTHING if cell["attribution"] is None else f"{cell['attribution']['bound']:.3f}"
            speedups = [interval_text(Interval(**cell[one]["speedup"])) for one in ("fused", "control")]
            link = f"[{name}]({root}/{folder.parent.name}/{folder.name}/{name}/report.md)"
            what = label(cell["overrides"], cell["mode"])
            rows.append([f"{link}, {what}", f"{torch:.2f}", f"{fused:.2f}", *speedups, bound])
    if not environments:
        raise ResultsError(f"{folder} has no report.json; record an ablation there, or remove the marker")
    header = ["configuration", "torch ms", "fused ms", "times as fast (95 %)", "A/A (95 %)", "bound of any norm kernel"]
    return compact_markdown(header, rows), environments


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


STEP_CODE = ("ops", "model", "training")  # the folders whose code runs in a training step
CODE = {"ablation": STEP_CODE, "scaling": STEP_CODE, "train_step": STEP_CODE}  # that a table describes; of all others ops/
CHANGED = re.compile(r"^Since git ([\w, ]+) the code in .* has changed\..*$", re.MULTILINE)


@cache
def is_changed(folder: str, revision: str) -> bool | None:
    """Whether the folder of the last commit differs from that of a revision; None where git does not know."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", revision, "HEAD", "--", folder]
    try:
        return {0: False, 1: True}.get(subprocess.run(command, capture_output=True, timeout=60).returncode)
    except OSError:  # no git
        return None


def changed_since(name: str, revisions: Sequence[str], before: str) -> str:
    """Says that code is newer than the records of a table, which are of these revisions; nothing if it is not.

    Where git does not know a revision (a shallow clone, an archive), this is what the page said `before` of the same records.
    """
    pairs = [(revision, folder) for revision in revisions for folder in CODE.get(name, ("ops",))]
    if any(is_changed(folder, revision) is None for revision, folder in pairs):
        said = CHANGED.search(before)
        return said.group() if said and {*said[1].split(", ")} <= {revision[:8] for revision in revisions} else ""
    changed = [(revision, folder) for revision, folder in pairs if is_changed(folder, revision)]
    older = ", ".join(dict.fromkeys(revision[:8] for revision, _ in changed))
    folders = ", ".join(dict.fromkeys(f"`{folder}/`" for _, folder in changed))
    return f"Since git {older} the code in {folders} has changed. These figures are of older code." if changed else ""


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "norms_models": lambda file: report.models_markdown(file["records"]),
    "norms": lambda file: report.norms_markdown(file["records"]),
    "host": host.markdown,
    "memory": memory.markdown,
    "published": published.markdown,
    "scaling": training_tables.scaling_markdown,
    "train_step": training_tables.steps_markdown,
}


def rewritten(text: str, page: Path, folder: Path = FOLDER) -> str:
    """The text of a page with new contents of every marked block.

    Raises:
        ResultsError: a marker names a table, a row or a file that is not there.
    """
    root = Path(os.path.relpath(folder.resolve(), page.resolve().parent)).as_posix()

    def block(match: re.Match[str]) -> str:
        begin, name, gpu, words, before, end = match.groups()
        table, origin, revisions = content(name, folder / gpu, words.split(), root)
        parts = [origin, changed_since(name, revisions, before)]
        return "\n\n".join([f"{begin}\n{table}", *filter(None, parts), end])

    new, count = BLOCK.subn(block, text)
    if text.count("<!-- benchmarks:") != count:
        raise ResultsError("a marker has no end, or is not of the form <!-- benchmarks: TABLE GPU [ROWS …] -->")
    return new


def content(name: str, folder: Path, words: Sequence[str], root: str) -> tuple[str, str, list[str]]:
    """A table, the machine and the revisions of its records in words, and these revisions."""
    if name == "ablation":
        table, environments = ablation(folder / name, words, root)
        revisions = filter(None, map(revision_of, environments.values()))
        return table, machines(environments), [*dict.fromkeys(revisions)]
    path = folder / f"{name}.json"
    if name not in TABLES:
        raise ResultsError(f"there is no table {name!r}; there are {', '.join(TABLES)} and ablation")
    if not path.exists():
        program = "norms --models" if name == "norms_models" else name
        raise ResultsError(f"{path} is not there; run python -m benchmarks.{program}, or remove the marker")
    if words and not name.startswith("norms"):
        raise ResultsError(f"the marker of {name} takes no words behind {folder.name}, got {' '.join(words)}; leave them out")
    file = load(path)
    table = by_width(file["records"], words) if words else TABLES[name](file)
    environment, counts = file["environment"], measured_at(file)
    return table, machine(environment, counts), [*counts] or [*filter(None, [revision_of(environment)])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    parser.add_argument("--readme", type=Path, nargs="+", default=PAGES, help="pages (README.md and docs/*.md)")
    parser.add_argument("--results", type=Path, default=FOLDER, help="(benchmarks/results)")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    for page in options.readme:
        text = page.read_text(encoding="utf-8")
        try:
            new = rewritten(text, page, options.results)
        except ResultsError as error:
            raise SystemExit(f"{page}: {error}") from error
        if options.check and new != text:
            raise SystemExit(f"{page} is not what {options.results} says; run python -m benchmarks.readme")
        if new != text:
            page.write_text(new, encoding="utf-8")
        print(f"{page}: {'as it was' if new == text else 'written'}, by {options.results}")


if __name__ == "__main__":
    main()
