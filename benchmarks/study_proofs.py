"""Whether compare.py finds what is there, and nothing else: real runs of arms whose difference is known.

python -m benchmarks.study_proofs                  planned for 6 minutes on an H100
python -m benchmarks.study_proofs --device cpu --studies 2 train.steps=20 model.width=32       to try it

aa         studies of two equal arms that have other seeds: at most a tenth may be called different
shifted    the same studies, with SHIFT added to each loss of the second arm: what such a study finds of it
handicap   half the width of all norm weights frozen at FROZEN

A record is one study: the difference of last losses with its 95 % interval and its p, and whether it was called different.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch

from benchmarks import command
from benchmarks.command import Record
from configs import machine
from data import load_corpus
from measure.progress import progress
from measure.statistics import Interval
from measure.tables import interval_text
from model import GPT
from model.norm import NormSite
from study.analysis import ArmReport, Report, analyse
from study.arms import Arm, Study, study_of
from study.plan import train_all
from study.runs import AGAIN, Found, Result
from training.step import MixedPrecision

SEEDS = 8  # of a study
SHIFT, FROZEN = 0.02, 0.5
KEYS = [
    *("experiment=shakespeare_char", "model.layers=4", "model.heads=4", "model.width=128", "model.context=128"),
    *("model.dropout=0.0", "norm.kind=rmsnorm", "train.batch_size=32", "train.steps=250", "optim.lr=3e-3"),
    *("optim.warmup_steps=null", "eval.every=0", "eval.batches=16", "compare.probe_every=0", "compare.timing_cycles=0"),
    "logging.wandb=disabled",
]
BASE, EQUAL, HANDICAP = "baseline", "equal", "handicap"


def half_frozen(model: GPT) -> None:
    """Half the width of each norm weight is FROZEN from the first step on."""
    for site in model.modules():
        if isinstance(site, NormSite) and site.weight is not None:
            half = site.width // 2
            with torch.no_grad():
                site.weight[:half] = FROZEN
            site.weight.register_hook(lambda g, half=half: torch.cat((torch.zeros_like(g[:half]), g[half:])))


def shifted(results: Sequence[Result], by: float) -> list[Result]:
    return [replace(run, evaluated=[[step, loss + by] for step, loss in run.evaluated]) for run in results]


def drawn(study: Study, runs: Sequence[Result], by: float) -> Report:
    """A study of runs with distinct seeds: those of two equal arms, the second shifted, and of A/A."""
    base, arm, again = (
        [replace(run, arm=name, seed=number) for number, run in enumerate(runs[i * SEEDS : (i + 1) * SEEDS])]
        for i, name in enumerate((BASE, EQUAL, BASE + AGAIN))
    )
    arms = [Arm(name, study.cfg) for name in (BASE, EQUAL)]
    return analyse(Study(arms, study.rates, list(range(SEEDS)), {}), Found([*base, *shifted(arm, by), *again]))


def record(proof: str, number: int, arm: ArmReport) -> Record:
    of = arm.against
    assert of is not None and of.loss is not None
    different = of.lower or of.higher
    return {"proof": proof, "study": number, "different": different, "difference": asdict(of.loss), "p": of.p_loss}


def records_of(study: Study, equal: Sequence[Result], known: Found, studies: int) -> list[Record]:
    """All studies.

    Args:
        equal: runs of equal arms, with distinct seeds.
        known: runs of the arms of `study`.
    """
    proofs = [(proof, i, by) for proof, by in (("aa", 0.0), ("shifted", SHIFT)) for i in range(studies)]
    made = [record(proof, i, drawn(study, equal[3 * SEEDS * i :], by).arms[1]) for proof, i, by in proofs]
    return [*made, record("handicap", 0, analyse(study, known).arms[1])]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("study_proofs", __doc__)
    parser.add_argument("--studies", type=command.positive, default=20, help="of equal arms (%(default)s)")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of all runs, as train.py takes them")
    options = command.parse(parser, argv)
    results = command.open_results(options)
    keys = [*KEYS, f"device={options.device.type}", *options.keys]
    study = study_of(keys)
    (arm,) = study.arms
    arms = [Arm(BASE, arm.cfg), Arm(HANDICAP, arm.cfg, half_frozen)]
    known = Study(arms, study.rates, list(range(1, SEEDS + 1)), {})
    # Half of them are the A/A runs, which have as many other seeds.
    equal = Study(arms[:1], study.rates, list(range(1, (3 * SEEDS * options.studies + 1) // 2 + 1)), {})

    precision = MixedPrecision.of(arm.cfg.train.precision, machine.inspect(arm.cfg.device))
    corpus = load_corpus(arm.cfg.data, arm.cfg.tokenizer, context=arm.cfg.model.context)
    with tempfile.TemporaryDirectory() as folder, progress(2 * len(equal.seeds) + 3 * SEEDS, "study_proofs", "run") as bar:
        runs = train_all(equal, precision, corpus, Path(folder) / "equal.jsonl", done=bar.update).results
        found = train_all(known, precision, corpus, Path(folder) / "known.jsonl", done=bar.update)
    results.add(records_of(known, runs, found, options.studies))
    for proof, of in groupby(results.finish(), lambda one: one["proof"]):
        proofs = list(of)
        last = interval_text(Interval(**proofs[-1]["difference"]), 4)
        print(f"{proof}: {sum(one['different'] for one in proofs)} of {len(proofs)} called different, the last {last}")


if __name__ == "__main__":
    main()
