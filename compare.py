"""Which norm, where, at which learning rate? Several models, trained at several rates with several seeds, side by side.

python compare.py norm.kind=layernorm,rmsnorm optim.lr=1e-3,3e-3,1e-2 seed=1,2,3 train.steps=300
python compare.py study=qk_norm                    a study of configs/study/
python compare.py study=qk_norm seed=1,2,3,4,5     its keys can be overridden
python compare.py --config-dir my/configs study=mine     one of your own: my/configs/study/mine.yaml
python compare.py folder=runs/NAME resume=auto ... goes on with a study that was stopped
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

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import hydra
import torch

import configs
from configs import ConfigError, command_line, keys, machine
from data import load_corpus
from measure import tables
from measure.environment import environment
from measure.progress import progress
from study import report, tracking
from study.analysis import analyse
from study.arms import Study, study_of
from study.runs import train_all
from training.command import end, start
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
    counts = {"arm": len(study.arms), "rate": len(study.rates), "seed": len(study.seeds)}
    sizes = " × ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    show(f"{sizes}, and A/A with as many other seeds, in {relative(folder)}")
    keep_facts(study, folder)
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    with command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    with progress((len(study.arms) * len(study.rates) + 1) * len(study.seeds), "compare", "run") as bar:
        found = train_all(study, precision, corpus, folder / "runs.jsonl", bar.update)
    with as_storage_errors(folder):
        facts = {"precision": str(precision), "minutes": round((time.monotonic() - began) / 60, 1), "command": command}
        made = analyse(study, found)
        report.write(made, study, found, environment(precision.device) | facts, folder)
    show(tables.aligned(*report.table(made)))
    show(f"report: {relative(folder)}/report.md")
    show(f"W&B: {tracking.log(study, made, found, folder)}")


def keep_facts(study: Study, folder: Path) -> None:
    """Keeps what the runs depend on, and refuses a folder with the runs of another study."""
    path, facts = folder / "study.json", json.loads(json.dumps(study.facts))
    if not path.is_file():
        replace_text(folder / "config.yaml", configs.to_yaml(study.cfg))
        replace_text(path, json.dumps(facts, indent=1) + "\n")
    elif (before := json.loads(path.read_text(encoding="utf-8"))) != facts:
        changed = [name for name in facts if facts[name] != before.get(name)]
        raise ConfigError(f"{relative(folder)} has another study: its {', '.join(changed)} differ. Use another folder=PATH.")


_folders: list[Path] = []  # of this process' study


@hydra.main(config_path=str(keys.FOLDER), config_name="compare", version_base=None)
def task(asked: tuple[list[str], Path]) -> None:
    arguments, wanted = asked
    study = study_of(arguments)
    folder = wanted if study.cfg.resume == "auto" and (wanted / "study.json").is_file() else claim(wanted)
    _folders.append(folder)
    try:
        with locked(folder):
            compare(study, folder, shlex.join(["python", "compare.py", *arguments]))
    except torch.OutOfMemoryError as error:
        remedy = "The runs that are done are kept. Timing needs memory for four models: compare.timing_cycles=0 leaves it out."
        print(f"out of memory: {str(error).splitlines()[0]}\n{remedy}\n{stopped()}", file=sys.stderr)
        end(OUT_OF_MEMORY)


def stopped() -> str:
    return "stopped" + (f"; to go on, add folder={relative(_folders[-1])} resume=auto to the command" if _folders else "")


def main(arguments: Sequence[str] | None = None) -> int:
    _folders.clear()
    return start(task, arguments, stopped)


if __name__ == "__main__":
    sys.exit(main())
