"""An ablation in several processes, one after the other: the variation between processes enters the intervals.

Where memory lies, how the host schedules and what a compiler chooses are drawn once for a process. Cycles inside it do not show
that. Each process is an ablation of its own, in a folder of its own; the first also measures parity. The samples are the
processes' speed-ups, and the interval is Student's, of the mean of their logarithms.
"""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measure import tables
from measure.comparison import TWIN, is_twin
from measure.sources import ROOT
from measure.statistics import Interval, mean_interval
from measure.tables import capital, interval_text, label
from training.interrupt import show
from training.storage import relative, replace_text

FIRST = "process_1"  # the folder
LEAST = 3  # processes whose interval is one: of two it is twelve times their deviation
PARITY_FAILS = 1  # exit code


def ablate(arguments: Sequence[str], count: int, folder: Path) -> int:
    """Runs what is missing, and writes report.md and report.json. Returns the exit code: that of the first process that failed,
    or of parity."""
    worst = 0
    for number in range(1, count + 1):
        place = folder / f"process_{number}"
        if not is_whole(place):
            keys = [f"folder={place}", "resume=auto", "ablate.processes=1", "logging.wandb=disabled"]
            keys += ["ablate.parity_seeds=0"] if number > 1 else []
            show(f"process {number} of {count}")
            code = subprocess.run([sys.executable, str(ROOT / "ablate.py"), *arguments, *keys]).returncode
            if code not in (0, PARITY_FAILS):
                return code
            worst = max(worst, code)
    reports = [json.loads((folder / f"process_{number}" / "report.json").read_text("utf-8")) for number in range(1, count + 1)]
    found = speedups(reports)
    command = shlex.join(["python", "ablate.py", *arguments])
    replace_text(folder / "report.json", json.dumps({"command": command, "pairs": found}, indent=1, allow_nan=False) + "\n")
    words = report(found, reports)
    replace_text(folder / "report.md", f"{words}\n\n## Command\n\n```\n{command}\n```\n")
    show(f"{words}\n\nreport: {relative(folder)}/report.md")
    return max([worst, *(PARITY_FAILS for one in reports[0]["parity"] if not one["holds"])])


def is_whole(folder: Path) -> bool:
    path = folder / "report.json"
    return path.is_file() and not json.loads(path.read_text("utf-8"))["unfinished"]


def speedups(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of each cell the speed-up of every process, and their mean with its interval."""
    found = []
    for cells in zip(*(report["cells"] for report in reports), strict=True):
        for base, arms in cells[0]["pairs"].items():
            for arm in arms:
                each = [cell["pairs"][base][arm]["speedup"]["median"] for cell in cells]
                mean = mean_interval(np.log(each))
                over = Interval(*(math.exp(x) for x in (mean.median, mean.low, mean.high)))
                cell = label(cells[0]["overrides"], cells[0]["mode"])
                found.append({"cell": cell, "arm": arm, "base": base, "speedup": vars(over), "processes": each})
    return found


def report(found: Sequence[dict[str, Any]], reports: Sequence[dict[str, Any]]) -> str:
    """In Markdown: a sentence for each cell, and a table of all pairs."""
    count, said = len(reports), []
    for cell in reports[0]["cells"]:
        title, subject = label(cell["overrides"], cell["mode"]), cell["subject"]
        own = {pair["base"]: pair for pair in found if pair["cell"] == title and pair["arm"] == subject}
        aa = [pair for pair in found if pair["cell"] == title and is_twin(pair["arm"])]
        fastest = min(own.values(), key=lambda pair: pair["speedup"]["median"])
        over = Interval(**fastest["speedup"])
        reach = max((abs(x - 1) for pair in aa for x in (pair["speedup"]["low"], pair["speedup"]["high"])), default=math.inf)
        different = count >= LEAST and not over.holds(1.0) and abs(over.median - 1) > reach
        words = f"{subject} {interval_text(over)} × as fast as {fastest['base']}, the fastest other arm"
        said.append(f"- {capital(title)}: {words if different else f'no difference found: {words}'}.")
        deviation = float(np.std(fastest["processes"], ddof=1))
        said[-1] += f" Between processes its standard deviation is {deviation:.4f}."
    header = ["cell", "arm over base", "speed-up (95 %)", "of each process"]
    rows = [
        [pair["cell"], f"{pair['arm']} over {pair['base']}" + " (A/A)" * pair["arm"].endswith(TWIN),
         interval_text(Interval(**pair["speedup"])), " ".join(f"{one:.3f}" for one in pair["processes"])]
        for pair in found
    ]  # fmt: skip
    few = "" if count >= LEAST else f" Fewer than {LEAST} processes allow no verdict."
    parity = [f"- Parity, {one['arm']}: {one['verdict']}" for one in reports[0]["parity"]]
    head = f"# {count} processes\n\nIntervals hold the variation between processes.{few}"
    return "\n\n".join([head, "\n".join(map(tables.wrapped, [*said, *parity])), tables.markdown(header, rows)])
