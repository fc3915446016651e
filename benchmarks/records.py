"""Records all that README and docs show, on the GPUs that are here. `make records` runs it.

python -m benchmarks.records                 what this card lacks, or has of other code; goes on where it stopped
python -m benchmarks.records --list          the commands, with the minutes that are planned for each, and which are done
python -m benchmarks.records --minutes 9     starts none that would end later, as planned
python -m benchmarks.records gpt2 norms_models      some of them, anew

A record is one file (of an ablation or a study one folder) of one revision by one command. One by this command that is not old
(measure/sources.py) is left alone. Each GPU makes one record at a time, the longest first; what a program prints is in
.cache/benchmarks/<record>.log. `gpt2_loss` needs a checkout of nanoGPT beside this one, `scaling` two GPUs. Not among them:
studies that take longer, and the runs that were trained to the end. Afterwards `python -m benchmarks.readme` writes tables,
figures and pictures.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import command, readme
from measure.files import discard, replace_text
from measure.sources import ROOT, changes, other_kernels, other_versions
from measure.tables import aligned
from training.storage import MARK

GPT2 = "ablate.py model=gpt2 model.vocab_size=50304 train.batch_size=32 ablate.parity_seeds=0 ablate.cycles=6"
LLAMA, GEMMA = (GPT2.replace("model=gpt2", f"model={name}") for name in ("llama", "gemma"))
CHAR = "ablate.py experiment=shakespeare_char"
# Files of an ablation or a study that nobody reads again, and that are large.
LEFT_OUT = ("kernels.jsonl", "config.yaml", ".lock", MARK)


@dataclass(frozen=True)
class Record:
    name: str
    words: str  # of the command behind `python`
    minutes: float  # planned, on an H100
    gpus: int = 1

    @property
    def folder(self) -> str:
        """The folder of those that have one of their own."""
        return {"ablate.py": "ablation", "compare.py": "study"}.get(self.words.partition(" ")[0], "")

    def path(self, folder: Path) -> Path:
        return folder / self.folder / self.name / "report.json" if self.folder else folder / f"{self.name}.json"


# What README shows first comes first. None takes more than ten minutes, so that each fits a short lease.
RECORDS = (
    Record("gpt2", f"{GPT2} model.dropout=0.0,0.1", 5),
    Record("llama", f"{LLAMA} model.dropout=0.0 model.qk_norm=false,true", 4.5),
    Record(
        "norms_models",
        "-m benchmarks.norms --models --residual fp32 --width 1152 2304 3072 3584 --warm 16",
        2.5,
    ),
    Record(
        "gpt2_loss",
        f"{GPT2} model.dropout=0.0,0.1 ablate.switch=loss ablate.eager=false "
        "ablate.arms=[torch,compiled,fused,nanogpt] ablate.nanogpt=../nanoGPT",
        5.25,
    ),
    Record("llama_mlp", f"{LLAMA} model.dropout=0.0 ablate.switch=mlp", 2),
    Record("gemma", f"{GEMMA} model.dropout=0.0 norm.placement=sandwich,pre", 5),
    Record("shakespeare_char", CHAR, 3.75),
    Record("adoption", "-m adoption.benchmark --model Llama Qwen3 Gemma3 DiT-B/2", 9.5),
    Record("sites", "-m benchmarks.sites --residual fp32 --width 768 2304 4608", 2.5),
    Record("rotary", "-m benchmarks.rotary --case rotary rms_rotary", 2),
    Record("activation", "-m benchmarks.activation", 0.5),
    Record("gated", "-m benchmarks.gated", 1.25),
    Record("modulated", "-m benchmarks.modulated", 3),
    Record("losses", "-m benchmarks.losses --case softmax cross_entropy", 1.75),
    Record("host", "-m benchmarks.host", 1),
    Record("memory", "-m benchmarks.memory", 1.5),
    Record("small", "ablate.py model.layers=2 model.width=128 train.batch_size=8 ablate.cycles=12 ablate.parity_seeds=0", 2.5),
    Record("overview", "compare.py study=overview", 5.5),
    Record("scaling", "-m benchmarks.scaling --ranks 1 2 --rounds 2", 7, gpus=2),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.records", description=__doc__.splitlines()[0])
    by_name = {record.name: record for record in RECORDS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name)} (all that are not done)")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no record that would end later (no limit)")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in by_name]:
        parser.error(f"{', '.join(unknown)}: no such record; there are {', '.join(by_name)}")
    here = torch.cuda.is_available()
    facts = command.environment(torch.device("cuda", 0) if here else torch.device("cpu"))
    folder, git = command.FOLDER / command.slug(facts), facts["git"]
    versions = {name: facts["versions"][name] for name in ("torch", "triton") if name in facts["versions"]}
    left = [record for record in RECORDS if not is_done(record, folder, versions)]
    if options.list:
        rows = [[r.name, f"{r.minutes:g}", "no" if r in left else "yes", f"python {r.words}"] for r in RECORDS]
        print(aligned(["record", "minutes", "done", "command"], rows, left=4))
        print(f"{sum(r.minutes for r in RECORDS):g} minutes in all, {sum(r.minutes for r in left):g} left")
        if not here:
            print("No GPU is here, so none is done on this machine; benchmarks/results has those of other machines.")
        return
    if not here:
        parser.error("there is no GPU here; --list shows what would run")
    if git is None or git["dirty"]:
        parser.error("a record is of one revision: commit the code, or set GIT_REVISION where git knows none")
    failed = run_all([by_name[name] for name in dict.fromkeys(options.names)] or left, folder, options.minutes)
    readme.main([])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run_all(records: Iterable[Record], folder: Path, minutes: float) -> list[str]:
    """Starts the longest record that the free GPUs and the minutes left allow, until there is none; the names of the failed."""
    count, named = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    free = named.split(",")[:count] if named else [*map(str, range(count))]
    waiting = sorted(records, key=lambda record: record.minutes, reverse=True)
    running: dict[Future[int], tuple[Record, list[str], float]] = {}
    failed, end = [], time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(count) as pool:
        while True:
            now = time.monotonic()
            fit = (record for record in waiting if record.gpus <= len(free) and now + 60 * record.minutes <= end)
            if record := next(fit, None):
                waiting.remove(record)
                gpus, free = free[: record.gpus], free[record.gpus :]
                running[pool.submit(run, record, folder, gpus)] = record, gpus, now
                print(f"{record.name}, GPU {' and '.join(gpus)}: python {record.words}", flush=True)
                continue
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                record, gpus, began = running.pop(future)
                free += gpus
                code = future.result()
                print(f"{record.name}: {(time.monotonic() - began) / 60:.1f} minutes, exit code {code}", flush=True)
                if code:
                    failed.append(record.name)
                    print(*log_of(record).read_text("utf-8", "replace").splitlines()[-20:], sep="\n", flush=True)
    for record in waiting:
        print(f"{record.name} is left out: it needs {record.gpus} GPU{'s' * (record.gpus > 1)} for {record.minutes:g} minutes")
    return failed


def is_done(record: Record, folder: Path, versions: Mapping[str, str]) -> bool:
    """Whether the record is there, by this command, whole, and of the code and the versions that are here."""
    found = read(record.path(folder))
    by_command = found.get("command") == f"python {record.words}" and not found.get("unfinished")
    return by_command and not changes(found) and not other_versions(found, versions, "installed")


def run(record: Record, folder: Path, gpus: Sequence[str]) -> int:
    """Measures, and puts the record in the place of the earlier one once it is whole.

    Returns:
        The exit code of the program; 0 where it is 1 because parity fails, which is a result.
    """
    words = [sys.executable, *shlex.split(record.words)]
    path = record.path(folder)
    place, earlier = path.parent, read(path)
    part = place.with_name(f"{record.name}.part")
    if record.folder:
        shutil.rmtree(part, ignore_errors=True)
        words += [f"folder={part}", "logging.wandb=disabled"]
    log_of(record).parent.mkdir(parents=True, exist_ok=True)
    with log_of(record).open("wb") as log:
        seen = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        code = subprocess.run(words, cwd=ROOT, env=seen, stdout=log, stderr=subprocess.STDOUT).returncode
    report = read(part / "report.json")
    # 1 is the exit code of other errors too, which leave a part of a report or none
    held = {one["holds"] for one in report.get("parity", [])}
    if code == 1 and not report.get("unfinished") and held - {True}:
        print(f"{record.name}: parity", "fails" if False in held else "can't be judged", flush=True)
        code = 0
    if record.folder and code == 0:
        for left_out in (*map(part.joinpath, LEFT_OUT), *part.glob("process_*")):
            discard(left_out)
        told = shlex.join(words[1:])
        for file in (part / "report.json", part / "report.md"):  # without the folder where it was measured
            text = file.read_text(encoding="utf-8").replace(f"{told} -m", told)  # -m: added by a program that sweeps
            text = text.replace(told, record.words).replace(str(part), f"runs/{record.name}")
            replace_text(file, text)
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
    if differ := other_kernels(read(path), earlier):
        print(f"{record.name}: compiled otherwise than in the earlier record: {', '.join(differ)}", flush=True)
    return code


def read(path: Path) -> dict[str, Any]:
    """A record, or nothing of one that is not there."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def log_of(record: Record) -> Path:
    """What the program of a record printed, in the last run of it."""
    return ROOT / command.SCRATCH / f"{record.name}.log"


if __name__ == "__main__":
    main()
