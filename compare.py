"""Which norm, where, at which learning rate? Several models, trained at several rates with several seeds, side by side.

python compare.py norm.kind=layernorm,rmsnorm optim.lr=1e-3,3e-3,1e-2 seed=1,2,3 train.steps=300
python compare.py study=qk_norm                    a study of configs/study/; study=PATH.yaml for your own
python compare.py study=qk_norm seed=1,2,3,4,5     its keys can be overridden
python compare.py folder=runs/NAME resume=auto ... goes on with a study that was stopped, or lets it grow: by seeds, rates, arms
python compare.py --help                           the keys it has of its own, and the studies

An arm is one combination of the swept keys, but for optim.lr and seed. docs/compare.md says how to read the report.
Ends with exit code 1 if the disk is full, 2 if the configuration is wrong, 130, 143, 129 and 138 by signals. All runs that were
over by then are kept.
"""

import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import torch
import yaml

import configs
from configs import ConfigError, command_line, keys, machine
from data import load_corpus
from measure import tables
from measure.environment import environment
from measure.progress import progress
from measure.sources import fingerprints
from study import report, tracking
from study.analysis import analyse
from study.arms import FOLDER, Study, study_of
from study.plan import train_all
from study.runs import read
from training.command import own_keys, program
from training.interrupt import show
from training.step import MixedPrecision
from training.storage import as_storage_errors, claim, locked, relative, replace_text

OUT_OF_MEMORY = 3  # exit code


def compare(study: Study, folder: Path, command: str) -> None:
    """Makes the runs that the folder lacks, and reports on all.

    Raises:
        ConfigError: the data or a model refuse what the config asks for, or the folder has another study.
        StorageError: a file can't be written.
    """
    began = time.monotonic()
    cfg = study.cfg
    show(f"{study.sizes}, in {relative(folder)}")
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    machine_facts = environment(precision.device)
    made_with = keep_facts(study, folder, machine_facts)
    with command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    with progress(None, "compare", "run") as bar:
        found = train_all(study, precision, corpus, folder / "runs.jsonl", made_with, bar.update)
    with as_storage_errors(folder):
        facts = {"precision": str(precision), "minutes": round((time.monotonic() - began) / 60, 1), "command": command}
        made = analyse(study, found)
        revisions = {one.get("revision", "not kept") for one in found.made}
        facts |= {"revisions": ", ".join(sorted(revisions))} if len(revisions) > 1 else {}
        report.write(made, study, found, machine_facts | facts, folder)
    show(tables.aligned(*report.table(made)))
    show(f"report: {relative(folder)}/report.md")
    show(f"W&B: {tracking.log(study, made, found, folder)}")


def keep_facts(study: Study, folder: Path, machine_facts: dict[str, Any]) -> dict[str, str]:
    """Keeps of what the arms are, and returns what each run says of code, versions and card.

    Raises:
        ConfigError: the folder has another arm of the same name, or runs of other code, versions or another card.
    """
    path, arms = folder / "study.json", json.loads(json.dumps(study.facts))
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for name in arms.keys() & before.keys():
        if changed := [key for key in arms[name] | before[name] if arms[name].get(key) != before[name].get(key)]:
            key = changed[0]
            there, here = (keys.shown(of.get(key)) for of in (before[name], arms[name]))
            raise ConfigError(
                f"{key}={here}: {relative(folder)} has {name} with {key}={there}. A study grows by arms, rates and seeds; "
                "for another one use another folder=PATH."
            )
    made = made_by(machine_facts)
    for other in read(folder / "runs.jsonl").made:
        if changed := [name for name in made if name != "revision" and other.get(name) != made[name]]:
            told = "; ".join(f"{name} {made[name]}, there {other.get(name, 'not kept')}" for name in changed)
            raise ConfigError(f"{relative(folder)} has runs of something else: {told}. Use another folder=PATH.")
    if not before:
        replace_text(folder / "config.yaml", configs.to_yaml(study.cfg))
    replace_text(path, json.dumps(before | arms, indent=1) + "\n")
    return made


def made_by(machine_facts: dict[str, Any]) -> dict[str, str]:
    """What each run says of the code, the versions and the card that made it."""
    git, gpu, versions = machine_facts["git"], machine_facts["gpu"], machine_facts["versions"]
    return {
        "revision": git["revision"][:12] + "+" * git["dirty"] if git else "unknown",
        "card": gpu["name"] if gpu else "CPU",
        **{name: versions[name] or "none" for name in ("torch", "triton")},
        "step": fingerprints()["step"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    folder: Path | None = None

    def work() -> int:
        nonlocal folder
        study = study_of(arguments)
        wanted = Path(study.cfg.folder or f"runs/{command_line.now()}_compare")
        folder = wanted if study.cfg.resume == "auto" and (wanted / "study.json").is_file() else claim(wanted)
        try:
            with locked(folder):
                compare(study, folder, shlex.join(["python", "compare.py", *arguments]))
        except torch.OutOfMemoryError as error:
            remedy = (
                "The runs that are done are kept. Timing needs memory for four models: compare.timing_cycles=0 leaves it out."
            )
            print(f"out of memory: {str(error).splitlines()[0]}\n{remedy}\n{stopped()}", file=sys.stderr)
            return OUT_OF_MEMORY
        return 0

    def stopped() -> str:
        return "stopped" + (f"; to go on, add folder={relative(folder)} resume=auto to the command" if folder else "")

    return program("compare.py", arguments, help_text, work, stopped)


def help_text() -> str:
    studies = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
    listed = "\n".join(f"  study={name:<20} {' '.join(one['claim'].split())}" for name, one in studies.items())
    keys = f"Keys of its own, with their defaults:\n\n{own_keys('compare')}"
    return f"{__doc__}\n{keys}\nStudies:\n\n{listed}\n\nAll others are those of `python train.py --help`."


if __name__ == "__main__":
    sys.exit(main())
