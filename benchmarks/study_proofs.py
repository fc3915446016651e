"""Whether compare.py finds what is there, and nothing else: real runs of arms whose difference is known.

python -m benchmarks.study_proofs                  planned for 5 minutes on an H100
python -m benchmarks.study_proofs --device cpu --studies 2 train.steps=20 model.width=32       to try it

aa         studies of two equal arms, each of SEEDS runs and the baseline of as many again, whose seeds no other study has
shifted    the same studies, with SHIFT added to each loss of the second arm: the power
planted    an arm that differs from the baseline in rounding alone (norm.eps), with SHIFT added to its losses
handicap   half the width of all norm weights frozen at FROZEN

The last two are judged together, against one baseline. A record is one arm of a study: the difference of last losses with its
95 % interval, its p, and whether it was called different.
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
from measure.differences import Difference, Sample, differences
from measure.progress import progress
from measure.statistics import Interval
from measure.store import Store
from measure.tables import interval_text
from model import GPT
from model.norm import NormSite
from study.arms import Arm, Study, study_of
from study.runs import FRESH, Runs
from training.precision import MixedPrecision

SEEDS = 8  # of an arm; the baseline has as many again
SHIFT, FROZEN = 0.02, 0.5
KEYS = [
    *("experiment=shakespeare_char", "model.layers=4", "model.heads=4", "model.width=128", "model.context=128"),
    *("model.dropout=0.0", "norm.kind=rmsnorm", "train.batch_size=32", "train.steps=250", "optim.lr=3e-3"),
    *("optim.warmup_steps=null", "eval.every=0", "eval.batches=16", "compare.timing_cycles=0"),
    "logging.wandb=disabled",
]
BASE, EQUAL, HANDICAP = "baseline", "another eps", "handicap"


def half_frozen(model: GPT) -> None:
    """Half the width of each norm weight is FROZEN from the first step on."""
    for site in model.modules():
        if isinstance(site, NormSite) and site.weight is not None:
            half = site.width // 2
            with torch.no_grad():
                site.weight[:half] = FROZEN
            site.weight.register_hook(lambda g, half=half: torch.cat((torch.zeros_like(g[:half]), g[half:])))


def shifted(sample: Sample, by: float) -> Sample:
    return replace(sample, losses=[loss + by for loss in sample.losses])


def record(proof: str, number: int, found: Difference) -> Record:
    loss = asdict(found.loss) if found.loss else None
    return {"proof": proof, "study": number, "different": bool(found.verdict), "difference": loss, "p": found.p_loss}


def studies_of(losses: Sequence[float], studies: int) -> list[Record]:
    """Of equal arms: 3 · SEEDS losses each."""
    made = []
    for proof, by in (("aa", 0.0), ("shifted", SHIFT)):
        for number in range(studies):
            own = losses[3 * SEEDS * number : 3 * SEEDS * (number + 1)]
            samples = {BASE: Sample(own[SEEDS:]), EQUAL: shifted(Sample(own[:SEEDS]), by)}
            made.append(record(proof, number, differences(samples, [(EQUAL, BASE)])[EQUAL, BASE]))
    return made


def known_of(base: Sample, equal: Sample, handicap: Sample) -> list[Record]:
    samples = {BASE: base, "planted": shifted(equal, SHIFT), "handicap": handicap}
    found = differences(samples, [("planted", BASE), ("handicap", BASE)])
    return [record(proof, 0, of) for (proof, _), of in found.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("study_proofs", __doc__)
    parser.add_argument("--studies", type=command.positive, default=20, help="of equal arms (%(default)s)")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of all runs, as train.py takes them")
    options = command.parse(parser, argv)
    results = command.open_results(options)
    keys = [*KEYS, f"device={options.device.type}", *options.keys]
    study = study_of(keys)
    (arm,), (other,) = study.arms, study_of([*keys, "norm.eps=1.01e-5"]).arms
    arms = [Arm(BASE, arm.cfg), Arm(EQUAL, other.cfg), Arm(HANDICAP, arm.cfg, half_frozen)]
    # Of the baseline each study of equal arms has a part, and the known arms the first.
    counts = {BASE: max(3 * options.studies, 2) * SEEDS, EQUAL: SEEDS, HANDICAP: SEEDS}

    precision = MixedPrecision.of(arm.cfg.train.precision, machine.inspect(arm.cfg.device))
    corpus = load_corpus(arm.cfg.data, arm.cfg.tokenizer, context=arm.cfg.model.context)
    with tempfile.TemporaryDirectory() as folder, progress(sum(counts.values()), "study_proofs", "run") as bar:
        known = Study(arms, study.rates, [1], {})
        runs = Runs(known, precision, corpus, Store(Path(folder) / "runs.jsonl", {}), done=bar.update)
        for one in arms:
            # The known arms share no seed with the baseline, as arms of a study that differ at all share nothing by theirs.
            first = 1 if one.name == BASE else counts[BASE] + 1
            runs.train(one, FRESH, study.rates, range(first, first + counts[one.name]))
        base, equal, handicap = (runs.found.sample(runs.found.of(one.name)) for one in arms)
    results.add(
        [*studies_of(base.losses, options.studies), *known_of(replace(base, losses=base.losses[: 2 * SEEDS]), equal, handicap)]
    )
    for proof, of in groupby(results.finish(), lambda one: one["proof"]):
        proofs = list(of)
        last = interval_text(Interval(**proofs[-1]["difference"]), 4)
        print(f"{proof}: {sum(one['different'] for one in proofs)} of {len(proofs)} called different, the last {last}")


if __name__ == "__main__":
    main()
