"""How often the parity test of ablate.py fails for arms that are correct.

python -m benchmarks.parity_errors                  of the default `python ablate.py`, a minute or more a seed on two cores
python -m benchmarks.parity_errors --seeds 6 ablate.parity_steps=2 model.width=64      to try it

A run of ablate.py takes `ablate.parity_seeds` seeds. DRAWS such runs are drawn of those measured here. A record is one arm:
in which share of the runs its parity fails, and how often each quantity fails; `any arm` is the run's.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ablation.parity import judge, run_seed
from ablation.records import SeedRun
from ablation.variants import variants_of
from benchmarks import command
from benchmarks.command import Record
from configs import machine
from data import load_corpus
from measure.progress import progress
from training.precision import MixedPrecision

DRAWS = 1000
ANY = "any arm"


def records_of(runs: Sequence[SeedRun], arms: Sequence[str], seeds: int, precision: MixedPrecision) -> list[Record]:
    draw, failed, quantities = np.random.default_rng(0), Counter[str](), Counter[str]()
    for _ in range(DRAWS):
        chosen = [runs[i] for i in draw.choice(len(runs), min(seeds, len(runs)), replace=False)]
        judged = {arm: judge(chosen, arm, precision, {}) for arm in arms}
        failed.update(arm for arm, of in judged.items() if not of.holds)
        failed[ANY] += not all(of.holds for of in judged.values())
        quantities.update(f"{arm}: {q.name}" for arm, of in judged.items() for q in of.quantities if not q.holds)
    return [
        {"arm": arm, "fails": failed[arm] / DRAWS, "seeds": len(runs), "draws": DRAWS}
        | {"quantities": {name: count / DRAWS for name, count in quantities.items() if arm in (ANY, name.partition(":")[0])}}
        for arm in (*arms, ANY)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.parser("parity_errors", __doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--seeds", type=command.positive, default=11, help="to measure (%(default)s)")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as ablate.py takes them")
    options = command.parse(parser, argv)
    results = command.open_results(options, published=True)
    (variant,) = variants_of([f"device={options.device.type}", "logging.wandb=disabled", *options.keys])
    cfg, runs = variant.cfg, list[SeedRun]()
    precision = MixedPrecision.of(cfg.train.precision, machine.inspect(cfg.device))
    corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    with progress(options.seeds, "parity_errors", "seed") as bar:
        for seed in range(1, options.seeds + 1):
            runs.append(run_seed(cfg, seed, precision, corpus, variant.tested))
            bar.update()
    results.add(records_of(runs, variant.tested, cfg.ablate.parity_seeds, precision))
    for record in results.finish():
        print(f"{record['arm']}: fails in {record['fails']:.1%} of runs; {record['quantities']}")


if __name__ == "__main__":
    main()
