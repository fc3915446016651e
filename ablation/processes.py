"""An ablation in several processes, one after the other: the variation between processes enters the intervals.

Where memory lies, how the host schedules and what a compiler chooses are drawn once for a process. Cycles inside it do not show
that. Each process is an ablation of its own, in a folder of its own; the first also measures parity. The samples are the
processes' speed-ups, and the interval is Student's, of the mean of their logarithms.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs import as_config_errors
from measure.comparison import TWIN, differs, is_twin, reach
from measure.files import json_text, relative, replace_text
from measure.sources import ROOT, together
from measure.statistics import Interval, geometric_mean
from measure.tables import capital, document, interval_text, label, listed, markdown
from training.interrupt import show

REPORT = "report.json"


def ablate(arguments: Sequence[str], count: int, folder: Path) -> int:
    """Runs the processes that the folder lacks, and writes report.md and report.json.

    Args:
        arguments: of the command, with its options.

    Returns:
        The exit code: that of the first process that did not finish; else 1 if parity fails.
    """
    reports: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        place = folder / f"process_{number}"
        keys = [f"folder={place}", "resume=auto", "ablate.processes=1", "logging.wandb=disabled"]
        keys += ["ablate.parity_seeds=0"] if number > 1 else []
        show(f"process {number} of {count}")
        code = subprocess.run([sys.executable, str(ROOT / "ablate.py"), *arguments, *keys]).returncode
        reports += [json.loads((place / REPORT).read_text("utf-8"))] if (place / REPORT).is_file() else []
        # 1 is the exit code of a full disk too, which leaves a part of a report or none
        if code not in (0, 1) or len(reports) < number or reports[-1]["unfinished"]:
            return code
    command, found = shlex.join(["python", "ablate.py", *arguments]), speedups(reports)
    with as_config_errors():
        ran = {"environment": reports[0]["environment"], "code": together([of["code"] for of in reports])}
    replace_text(folder / REPORT, json_text({"command": command, **ran, "pairs": found}, indent=1) + "\n")
    words = report(found, reports)
    replace_text(folder / "report.md", f"{words}\n## Command\n\n```\n{command}\n```\n")
    show(f"{words}\nreport: {relative(folder)}/report.md")
    return 0 if all(one["holds"] for one in reports[0]["parity"]) else 1


def speedups(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each pair of each cell the speed-up of every process, and their mean with its interval."""
    found = []
    for cells in zip(*(report["cells"] for report in reports), strict=True):
        for base, arms in cells[0]["pairs"].items():
            for arm in arms:
                each = [cell["pairs"][base][arm]["speedup"]["median"] for cell in cells]
                pair = {"cell": label(cells[0]["overrides"], cells[0]["mode"]), "arm": arm, "base": base}
                found.append(pair | {"speedup": vars(geometric_mean(each)), "processes": each})
    return found


def report(found: Sequence[dict[str, Any]], reports: Sequence[dict[str, Any]]) -> str:
    """In Markdown: a sentence for each cell, and a table of all pairs."""
    said = []
    for cell in reports[0]["cells"]:
        title, subject = label(cell["overrides"], cell["mode"]), cell["subject"]
        own = [one for one in found if one["cell"] == title]
        fastest = min((one for one in own if one["arm"] == subject), key=lambda one: one["speedup"]["median"])
        over, noise = Interval(**fastest["speedup"]), reach(Interval(**one["speedup"]) for one in own if is_twin(one["arm"]))
        words = f"{subject} {interval_text(over)} × as fast as {fastest['base']}, the fastest other arm"
        said.append(f"{capital(title)}: {'' if differs(over, noise) else 'no difference found: '}{words}.")
        said[-1] += f" Between processes its standard deviation is {np.std(fastest['processes'], ddof=1):.4f}."
    said += [f"Parity, {one['arm']}: {one['verdict']}" for one in reports[0]["parity"]]
    rows = [
        [one["cell"], f"{one['arm']} over {one['base']}" + " (A/A)" * one["arm"].endswith(TWIN),
         interval_text(Interval(**one["speedup"])), " ".join(f"{each:.3f}" for each in one["processes"])]
        for one in found
    ]  # fmt: skip
    table = markdown(["cell", "arm over base", "speed-up (95 %)", "of each process"], rows)
    return document(f"{len(reports)} processes", "Intervals hold the variation between processes.", listed(said), table)
