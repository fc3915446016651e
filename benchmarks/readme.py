"""Writes the tables of README.md from recorded results, between markers that name what goes there.

python -m benchmarks.readme            rewrites
python -m benchmarks.readme --check    fails if README.md is not what the records say

    <!-- benchmarks: norms nvidia-h200 -->
    anything here is replaced
    <!-- end of benchmarks -->
"""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ablation import serialize
from ablation.compared import FUSED, TORCH
from benchmarks import scaling_tables, step_tables, tables
from benchmarks.plots import machine
from benchmarks.results import FOLDER, ResultsError, load

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- benchmarks: (\w+) ([\w-]+) -->\n)(.*?)(<!-- end of benchmarks -->)", re.DOTALL)


def norms(file: dict[str, Any]) -> str:
    return tables.norms_markdown(file["records"])


def norms_models(file: dict[str, Any]) -> str:
    return tables.models_markdown(file["records"])


def host(file: dict[str, Any]) -> str:
    chosen = [record for record in file["records"] if record["case"] == "add_rms"]
    return tables.markdown(tables.HOST_HEADER, tables.host_rows(chosen))


def memory(file: dict[str, Any]) -> str:
    widest = max(record["N"] for record in file["records"])
    chosen = [r for r in file["records"] if r["N"] == widest and r["case"] == "dropout_add_ln"]  # RMSNorm's are as large
    return tables.markdown(tables.MEMORY_HEADER, tables.memory_rows(chosen))


def seed_figures(file: dict[str, Any]) -> str:
    found = tables.seed_tables(file["records"])
    return "\n\n".join(f"{title}\n\n{tables.markdown(header, rows)}" for title, header, rows in found.values())


def ablation(folder: Path) -> str:
    """A row for each cell of the ablations recorded in the folder: gpt2/, shakespeare_char/ …"""
    rows, machines = [], []
    for name in sorted(path.parent.name for path in folder.glob("*/report.json")):
        found = serialize.load(folder / name)
        machines.append(machine(found.environment))
        for cell in found.cells:
            torch, fused = (median(itertools.chain(*cell.arms[arm].blocks_ms)) for arm in (TORCH, FUSED))
            bound = "–" if cell.attribution is None else f"{cell.attribution.bound:.3f}"
            speedups = [
                f"{one.speedup.median:.3f} ({one.speedup.low:.3f} to {one.speedup.high:.3f})"
                for one in (cell.fused, cell.control)
            ]
            what = ", ".join([cell.mode, *(f"{key}={value}" for key, value in cell.overrides.items())])
            link = f"[{name}](benchmarks/results/{folder.parent.name}/{folder.name}/{name}/report.md)"
            rows.append([f"{link}, {what}", f"{torch:.2f}", f"{fused:.2f}", *speedups, bound])
    if not machines:
        raise ResultsError(f"README.md: {folder} has no report.json; record an ablation there, or remove the marker")
    header = ["configuration", "torch ms", "fused ms", "times as fast (95 %)", "A/A (95 %)", "bound of any norm kernel"]
    return f"{tables.markdown(header, rows)}\n\n{'; '.join(dict.fromkeys(machines))}"


TABLES = {
    "norms_models": norms_models,
    "norms": norms,
    "host": host,
    "memory": memory,
    "seed_figures": seed_figures,
    "scaling": scaling_tables.markdown,
    "train_step": step_tables.markdown,
}


def rewritten(text: str, folder: Path = FOLDER) -> str:
    """README's text with every marked block made anew.

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
