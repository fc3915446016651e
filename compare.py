"""Which norm, where, at which learning rate? Several models, trained at several rates with several seeds, side by side.

python compare.py norm.kind=layernorm,rmsnorm optim.lr=1e-3,3e-3,1e-2 seed=1,2,3 train.steps=300
python compare.py study=qk_norm                    a study of configs/study/; --config-dir for your own
python compare.py study=qk_norm seed=1,2,3,4,5     its keys can be overridden
python compare.py folder=runs/NAME resume=auto ... goes on with a study that was stopped
python compare.py --help                           the keys it has of its own, and the studies

An arm is one combination of the swept keys, but for optim.lr and seed. docs/compare.md says how to read the report.
Ends with exit code 1 if the disk is full, 2 if the configuration is wrong, 130, 143, 129 and 138 by signals. All runs that were
over by then are kept.
"""

import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import torch
import yaml

import configs
from configs import command_line, machine
from data import load_corpus
from measure import tables
from measure.environment import environment
from measure.files import relative, replace_text
from measure.progress import progress
from measure.store import Store
from study import report, tracking
from study.analysis import analyse
from study.arms import FOLDER, Study, study_of
from study.runs import train_all
from training.command import own_keys, place, program
from training.interrupt import show
from training.precision import MixedPrecision

OUT_OF_MEMORY = 3  # exit code


def compare(study: Study, folder: Path, command: str) -> None:
    """Makes the runs that the folder lacks, and reports on all.

    Raises:
        ConfigError: the data or a model refuse what the config asks for, or the folder has runs of another study.
        StorageError: a file can't be written.
    """
    began = time.monotonic()
    cfg = study.cfg
    counts = {"arm": len(study.arms), "rate": len(study.rates), "seed": len(study.seeds)}
    sizes = " × ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    show(f"{sizes}, and A/A with as many other seeds, in {relative(folder)}")
    store = Store(folder / "runs.jsonl", study.facts)
    replace_text(folder / "config.yaml", configs.to_yaml(cfg))
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    with command_line.as_config_errors():
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    with progress((len(study.arms) * len(study.rates) + 1) * len(study.seeds), "compare", "run") as bar:
        found = train_all(study, precision, corpus, store, bar.update)
    facts = {"precision": str(precision), "minutes": round((time.monotonic() - began) / 60, 1), "command": command}
    made = analyse(study, found)
    report.write(made, study, found, environment(precision.device) | facts, folder)
    show(tables.aligned(*report.table(made)))
    show(f"report: {relative(folder)}/report.md")
    show(f"W&B: {tracking.log(study, made, found, folder)}")


def main(arguments: Sequence[str] | None = None) -> int:
    folder: Path | None = None

    def work(arguments: list[str]) -> int:
        nonlocal folder
        study = study_of(arguments)
        try:
            with place(study.cfg, "compare.py") as folder:
                compare(study, folder, shlex.join(["python", "compare.py", *sys.argv[1:]]))
        except torch.OutOfMemoryError as error:
            remedy = (
                "The runs that are done are kept. Timing needs memory for four models: compare.timing_cycles=0 leaves it out."
            )
            print(f"out of memory: {str(error).splitlines()[0]}\n{remedy}\n{stopped()}", file=sys.stderr)
            return OUT_OF_MEMORY
        return 0

    def stopped() -> str:
        return "stopped" + (f"; to go on, add folder={relative(folder)} resume=auto to the command" if folder else "")

    return program("compare", work, help_text, stopped, arguments)


def help_text() -> str:
    studies = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}
    listed = "\n".join(f"  study={name:<20} {' '.join(one['claim'].split())}" for name, one in studies.items())
    keys = f"Keys of its own, with their defaults:\n\n{own_keys('compare')}"
    return f"{__doc__}\n{keys}\nStudies:\n\n{listed}\n\nAll others are those of `python train.py --help`."


if __name__ == "__main__":
    sys.exit(main())
