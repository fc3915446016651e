"""Writes the tables of README.md from recorded results, between markers that name what goes there.

python -m benchmarks.readme            rewrites
python -m benchmarks.readme --check    fails if README.md is not what the records say

    <!-- benchmarks: norms nvidia-h200 -->
    anything here is replaced
    <!-- end of benchmarks -->
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import host, memory, report, seed_figures, training_tables
from benchmarks.command import FOLDER, ResultsError, load
from measure.comparison import FUSED, TORCH
from measure.statistics import Interval
from measure.tables import NOTHING, compact_markdown, interval_text, label, machine

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+) -->\n)(.*?)(<!-- end of benchmarks -->)", re.DOTALL)


def ablation(folder: Path) -> str:
    """A row for each cell of the ablations that are recorded in the folder: gpt2/, shakespeare_char/ …"""
    rows, machines = [], []
    for path in sorted(folder.glob("*/report.json")):
        found, name = json.loads(path.read_text(encoding="utf-8")), path.parent.name
        machines.append(machine(found["environment"]))
        for cell in found["cells"]:
            torch, fused = (cell["arms"][arm]["step_ms"]["median"] for arm in (TORCH, FUSED))
            bound = NOTHING if cell["attribution"] is None else f"{cell['attribution']['bound']:.3f}"
            speedups = [interval_text(Interval(**cell[one]["speedup"])) for one in ("fused", "control")]
            link = f"[{name}](benchmarks/results/{folder.parent.name}/{folder.name}/{name}/report.md)"
            what = label(cell["overrides"], cell["mode"])
            rows.append([f"{link}, {what}", f"{torch:.2f}", f"{fused:.2f}", *speedups, bound])
    if not machines:
        raise ResultsError(f"README.md: {folder} has no report.json; record an ablation there, or remove the marker")
    header = ["configuration", "torch ms", "fused ms", "times as fast (95 %)", "A/A (95 %)", "bound of any norm kernel"]
    return f"{compact_markdown(header, rows)}\n\n{'; '.join(dict.fromkeys(machines))}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "norms_models": lambda file: report.models_markdown(file["records"]),
    "norms": lambda file: report.norms_markdown(file["records"]),
    "host": host.markdown,
    "memory": memory.markdown,
    "seed_figures": seed_figures.markdown,
    "scaling": training_tables.scaling_markdown,
    "train_step": training_tables.steps_markdown,
}


def rewritten(text: str, folder: Path = FOLDER) -> str:
    """README's text with new contents of every marked block.

    Raises:
        ResultsError: a marker names a table or a file that is not there.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, gpu, _, end = match.groups()
        return f"{begin}\n{content(name, folder / gpu)}\n\n{end}"

    return BLOCK.sub(block, text)


def content(name: str, folder: Path) -> str:
    if name == "ablation":
        return ablation(folder / name)
    path = folder / f"{name}.json"
    if name not in TABLES:
        raise ResultsError(f"README.md: there is no table {name!r}; there are {', '.join(TABLES)} and ablation")
    if not path.exists():
        program = "norms --models" if name == "norms_models" else name
        raise ResultsError(f"README.md: {path} is not there; run python -m benchmarks.{program}, or remove the marker")
    file = load(path)
    return f"{TABLES[name](file)}\n\n{machine(file['environment'])}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    parser.add_argument("--readme", type=Path, default=README, help="(README.md)")
    parser.add_argument("--results", type=Path, default=FOLDER, help="(benchmarks/results)")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    text = options.readme.read_text(encoding="utf-8")
    try:
        new = rewritten(text, options.results)
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    if options.check and new != text:
        raise SystemExit(f"{options.readme} is not what {options.results} says; run python -m benchmarks.readme")
    if new != text:
        options.readme.write_text(new, encoding="utf-8")
    print(f"{options.readme}: {'as it was' if new == text else 'written'}, by {options.results}")


if __name__ == "__main__":
    main()
