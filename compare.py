"""Which norm, where, at which learning rate? Several models, trained at several rates with several seeds, side by side.

python compare.py norm.kind=layernorm,rmsnorm optim.lr=1e-3,3e-3,1e-2 seed=1,2,3 train.steps=300
python compare.py study=qk_norm                    a study of configs/study/; --config-dir for your own
python compare.py study=qk_norm seed=1,2,3,4,5     its keys can be overridden
python compare.py folder=runs/NAME resume=auto ... goes on with a study that was stopped, or adds seeds, rates or arms to it
python compare.py --help                           the keys it has of its own, and the studies

An arm is one combination of the swept keys, but for optim.lr and seed. docs/compare.md says how to read the report.
Ends with exit code 1 if the disk is full, 2 if the configuration is wrong, 130, 143, 129 and 138 by signals. All runs that were
over by then are kept.
"""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback where Ctrl-C comes during the imports, which take seconds

import hydra
from hydra.core.global_hydra import GlobalHydra

import configs
from configs import ConfigError, as_config_errors, keys, machine
from data import load_corpus
from measure import tables
from measure.environment import environment
from measure.files import json_text, relative, replace_text
from measure.progress import progress
from measure.sources import code
from measure.store import Store, comparable
from study import ladder, report, tracking
from study.analysis import analyse
from study.arms import Study, sizes_of, study_of
from study.config import Config
from study.plan import least_runs, make_all, make_equal_time
from study.runs import Runs
from training.command import start
from training.interrupt import show
from training.place import place
from training.precision import MixedPrecision
from training.tracking import log_group

LESS_MEMORY = "Timing needs memory for four models: compare.timing_cycles=0 leaves it out."


def compare(study: Study, folder: Path, command: str) -> None:
    """Makes the runs that the folder lacks, and reports on all.

    Raises:
        ConfigError: as `runs_of`.
        StorageError: a file can't be written.
    """
    began, cfg = time.monotonic(), study.cfg
    counts = {"arm": len(study.arms), "rate": len(study.rates), "seed": len(study.seeds)}
    sizes = " × ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    show(f"{sizes}, {len(study.compared)} seeds to compare at each arm's best rate, in {relative(folder)}")
    more = "; the search adds rates around the best one of each arm" if len(study.rates) > 1 else ""
    show(f"at least {least_runs(study)} runs in all{more}")
    with progress(None, "compare", "run") as bar:
        runs = runs_of(study, folder, bar.update)
        make_all(study, runs.found, runs.train, runs.time)
        if cfg.compare.equal_time:
            steps = {arm.name: arm.steps for arm in analyse(study, runs.found).arms if arm.steps is not None}
            make_equal_time(study, runs.found, runs.train, steps)
    minutes = round((time.monotonic() - began) / 60, 1)
    facts = environment(runs.precision.device) | {"precision": str(runs.precision), "minutes": minutes, "command": command}
    found = analyse(study, runs.found)
    report.write(found, study, runs.found, facts, folder)
    show(tables.aligned(*report.table(found)))
    show(f"report: {relative(folder)}/report.md")
    logged = tracking.runs_of(study, found, runs.found, folder)
    show(f"W&B: {log_group(cfg.logging, folder, 'study', logged)}")


def climb(studies: Mapping[str, Study], folder: Path, command: str) -> None:
    """Makes the runs of all sizes, each in a folder of its own, and reports on them. Raises as `compare`."""
    show(f"at least {ladder.least_runs([*studies.values()])} runs in all, in {relative(folder)}")
    with progress(None, "compare", "run") as bar:
        runs = {size: runs_of(study, folder / size, bar.update) for size, study in studies.items()}
        found = ladder.climb(runs)
    text = ladder.report(found)
    replace_text(folder / "ladder.md", text)
    (first, *_) = runs.values()
    told = {"command": command, "environment": environment(first.precision.device), "code": code()}
    rungs = {arm: [asdict(rung) for rung in of] for arm, of in found.items()}
    replace_text(folder / "report.json", json_text(told | {"ladder": rungs}, indent=1) + "\n")
    show(f"{text}\nreport: {relative(folder)}/ladder.md")


def runs_of(study: Study, folder: Path, done: Callable[[], object]) -> Runs:
    """
    Raises:
        ConfigError: the data or a model refuse what the config asks for, or the folder has runs of the same arms with other
            keys, or of other code, versions or another card.
    """
    cfg = study.cfg
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    facts = comparable(environment(precision.device))
    code()  # of what is loaded, as it is now: its files may change before the report has it
    with as_config_errors():
        # Seeds that are compared at a single rate may be those that choose among several.
        store = Store(folder / "runs.jsonl", facts | {"several rates": len(study.rates) > 1})
        replace_text(folder / "config.yaml", configs.to_yaml(cfg))
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        return Runs(study, precision, corpus, store, done)


@hydra.main(config_path="configs", config_name="compare", version_base=None)
def task(arguments: list[str]) -> None:
    """The comparison of these overrides."""
    study, sizes = study_of(arguments), {size: study_of(arguments, size) for size in sizes_of(arguments)}
    if len(study.arms) == len(study.rates) == 1:
        raise ConfigError(
            "one arm at one rate: there is nothing to compare. Give several values of a key and of the learning rate, such as "
            "norm.kind=layernorm,rmsnorm optim.lr=1e-3,3e-3,1e-2, or a study, such as study=first; --help lists them."
        )
    with place(study.cfg, LESS_MEMORY) as folder:
        command = shlex.join(["python", "compare.py", *sys.argv[1:]])
        if sizes:
            climb(sizes, folder, command)
        else:
            compare(study, folder, command)


def main(arguments: Sequence[str] | None = None) -> int:
    return start(task, Config, help_text, arguments)


def help_text(cfg: Config) -> str:
    loader, listed = GlobalHydra.instance().config_loader(), ""
    for name in loader.get_group_options("study"):  # also those of --config-dir
        source = next(of for of in loader.get_sources() if of.is_config(f"study/{name}"))
        study: Any = source.load_config(f"study/{name}").config
        listed += f"  study={name:<20} {' '.join(study.get('claim', '').split())}\n"
    own = f"Keys of its own:\n{keys.describe(cfg, 'compare')}"
    return f"{__doc__}\n{own}\nStudies:\n\n{listed}\nAll others are those of `python train.py --help`."


if __name__ == "__main__":
    sys.exit(main())
