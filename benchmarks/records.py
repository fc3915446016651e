"""Records all that README and docs show, on the GPU that is here. `make records` runs it.

python -m benchmarks.records                 what this card lacks, or has of other code; goes on where it stopped
python -m benchmarks.records --list          the commands, with the minutes that are planned for each, and which are done
python -m benchmarks.records gpt2 norms_models      some of them, anew

A record is one file (of an ablation or a study one folder) of one revision by one command. One by this command that is not old
(measure/sources.py) is left alone. `gpt2_loss` needs a checkout of nanoGPT beside this one, `scaling` two GPUs; without them it
is left out. Not among them: studies that take longer, and the runs that were trained to the end. Afterwards
`python -m benchmarks.readme` writes tables, figures and pictures.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import command, readme
from measure.files import discard, replace_text
from measure.sources import ROOT, changes, other_versions
from measure.tables import aligned
from training.storage import MARK

GPT2 = "ablate.py model=gpt2 model.vocab_size=50304 train.batch_size=32 ablate.parity_seeds=0 ablate.cycles=6"
LLAMA, GEMMA = (GPT2.replace("model=gpt2", f"model={name}") for name in ("llama", "gemma"))
CHAR = "ablate.py experiment=shakespeare_char"
PARITY_FAILS = 1  # exit code of ablate.py: a record all the same
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


# What README shows first comes first. None takes more than eight minutes, so that each fits a short lease.
RECORDS = (
    Record("gpt2", f"{GPT2} model.dropout=0.0,0.1", 5),
    Record("llama", f"{LLAMA} model.dropout=0.0 model.qk_norm=false,true", 5),
    Record(
        "norms_models",
        "-m benchmarks.norms --models --residual fp32 --width 1152 2304 3072 3584 --warm 16",
        5.5,
    ),
    Record(
        "gpt2_loss",
        f"{GPT2} model.dropout=0.0,0.1 ablate.switch=loss ablate.eager=false "
        "ablate.arms=[torch,compiled,fused,nanogpt] ablate.nanogpt=../nanoGPT",
        3.5,
    ),
    Record("llama_mlp", f"{LLAMA} model.dropout=0.0 ablate.switch=mlp", 2),
    Record("gemma", f"{GEMMA} model.dropout=0.0 norm.placement=sandwich,pre", 5),
    Record("shakespeare_char", CHAR, 4),
    Record("adoption", "-m adoption.benchmark", 4),
    Record("sites", "-m benchmarks.sites --residual fp32 --width 768 2304 4608", 2.5),
    Record("rotary", "-m benchmarks.rotary --case rotary rms_rotary", 2),
    Record("activation", "-m benchmarks.activation", 0.5),
    Record("gated", "-m benchmarks.gated", 1.25),
    Record("modulated", "-m benchmarks.modulated", 4),
    Record("losses", "-m benchmarks.losses --case softmax cross_entropy", 2),
    Record("host", "-m benchmarks.host", 0.75),
    Record("memory", "-m benchmarks.memory", 1.5),
    Record("gpt2_processes", f"{GPT2} model.dropout=0.1 ablate.eager=false ablate.processes=3", 3.75),
    Record("small", "ablate.py model.layers=2 model.width=128 train.batch_size=8 ablate.cycles=12 ablate.parity_seeds=0", 1.5),
    Record("overview", "compare.py study=overview", 5.5),
    Record("scaling", "-m benchmarks.scaling --ranks 1 2 --rounds 2", 7, gpus=2),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.records", description=__doc__.splitlines()[0])
    by_name = {record.name: record for record in RECORDS}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(by_name)} (all that are not done)")
    parser.add_argument("--list", action="store_true", help="measure nothing")
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
        return
    if not here:
        parser.error("there is no GPU here; --list shows what would run")
    if git is None or git["dirty"]:
        parser.error("a record is of one revision: commit the code, or set GIT_REVISION where git knows none")
    failed = []
    for record in [by_name[name] for name in options.names] or left:
        if torch.cuda.device_count() < record.gpus:
            print(f"{record.name} is left out: it needs {record.gpus} GPUs", flush=True)
            continue
        print(f"{record.name}: python {record.words}", flush=True)
        began, code = time.monotonic(), run(record, folder)
        print(f"{record.name}: {(time.monotonic() - began) / 60:.1f} minutes, exit code {code}", flush=True)
        failed += [record.name] if code else []
    readme.main([])
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def is_done(record: Record, folder: Path, versions: Mapping[str, str]) -> bool:
    """Whether the record is there, by this command, whole, and of the code and the versions that are here."""
    path = record.path(folder)
    if not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    by_command = found.get("command") == f"python {record.words}" and not found.get("unfinished")
    return by_command and not changes(found) and not other_versions(found, versions, "installed")


def run(record: Record, folder: Path) -> int:
    """Measures, and puts the record in the place of the earlier one once it is whole; the exit code of the program."""
    words = [sys.executable, *shlex.split(record.words)]
    if not record.folder:
        return subprocess.run(words, cwd=ROOT).returncode
    place = record.path(folder).parent
    part = place.with_name(f"{record.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    words += [f"folder={part}", "logging.wandb=disabled"]
    code = subprocess.run(words, cwd=ROOT).returncode
    if code in (0, PARITY_FAILS):
        for path in (*map(part.joinpath, LEFT_OUT), *part.glob("process_*")):
            discard(path)
        for file in (part / "report.json", part / "report.md"):  # without the folder where it was measured
            text = file.read_text(encoding="utf-8")
            text = text.replace(shlex.join(words[1:]), record.words).replace(str(part), f"runs/{record.name}")
            replace_text(file, text)
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
    return code


if __name__ == "__main__":
    main()
