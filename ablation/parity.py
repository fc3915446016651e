"""Loss parity: whether what is compared, norms or losses, is wrong, or merely rounded elsewhere.

Two correct programs may give different bits, so a comparison needs a tolerance. A tolerance that was tuned until tests pass
proves nothing; this one is measured. Arms train from the same weights, on the same batches, with the same dropout masks:

    a   reference   PyTorch's operators; weights, products and residual stream in fp32 (in fp64 where the run itself is in fp32)
    b   torch       PyTorch's operators in the run's precision
    c   tested      fused ones in the run's precision (where no kernel runs, their PyTorch reference); each other arm likewise
    d   reordered   as b, with the sums of its norms, or of its loss, in other, just as legitimate orders: ORDERS of them

Quantities: the loss and the gradient norm over all steps; at the first step, where all arms have the same weights, the
gradient of every layer, and of norms the scale ⟨y, y_a⟩ / ⟨y_a, y_a⟩ of every row y that they put out (a mistake in a row's
statistics is the same all along the row; the rounding of single elements to bf16 would hide it); and the parameters after the
last step. Seeds differ in batches and masks, and in weights unless init_from gives them. For each quantity and seed, over its
elements:

    D_x = rms(x − a)    expected = √(D_b² + rms(d − b)²)    R_c = D_c / expected    R_d = D_d / expected    (rms over all d)
    S_x = ⟨x − b, a⟩ / ⟨a, a⟩ · rms(a) / expected                   what all elements have in common, which rms hides in noise

(No D, and no allowed shift, is less than a unit in the last place of fp32, ε · rms(a): 2⁻²³ of the quantity's size.)
`expected` is the error that the run's rounding and another order explain, so R is near 1 or below for a correct operator.

**Size.** A shuffled order keeps the way in which a sum is cut into parts, and another program cuts it otherwise: on two CPU
threads torch.compile's sums of weight gradients lie 1.7 times as far from the reference as shuffled ones do, and not farther
than `expected`. So it is this that R_c is compared with, or R_d if that is larger, and the tested arm, which rounds in other
places, may be farther by the factor MARGIN. It fails if log R_c is further above: a one-sided t-test over seeds.

**Sign.** Rounding errors have random signs, a wrong formula has the same at every seed. It fails if the mean of S_c
over seeds is farther from 0 than BIAS: a two-sided t-test, with a standard deviation no smaller than the rms of S_d, so that
seeds which agree by chance don't make a verdict. Not for parameters: their a is mostly their initial value.

All tests of all arms of a run together have the level LEVEL, each has LEVEL / number of tests (Bonferroni). Five seeds have 2⁵
signs, too few for a permutation test. Two guards have no level, because a t-test over few seeds can't see their cases: a seed
fails if its tested arm is GROSS times as far as expected, or shifted by as much, which would widen the spread that hides it;
and the mean over seeds must stay below GROSS_FEW, as FEW seeds or fewer have no t-test, and a few more estimate their spread
roughly. `python -m benchmarks.parity_errors` measures how often a correct arm fails.

Ten steps, the default, say nothing of where training ends: `compare.py` compares outcomes.

Dropout on attention weights is off in all arms. It draws from torch's generator, and what it draws depends on the dtype.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import ops
from ablation.arms import Arm
from ablation.config import Config, Switch
from ablation.parity_arms import ORDER_NAMES, parity_arms, row_sites, unclipped_gradients
from ablation.records import Parity, SeedRun
from ablation.rounding import LEVEL, REFERENCE, Distances, Sums, row_scales, sign_test, size_test
from data import Batches, Corpus
from measure.comparison import FUSED, TORCH
from training.precision import MixedPrecision

Quantities = Mapping[str, Mapping[str, Iterable[Tensor]]]  # by name: by arm, the tensors that are compared as one


def run_seed(cfg: Config, seed: int, precision: MixedPrecision, corpus: Corpus, tested: Sequence[str]) -> SeedRun:
    """Trains the arms side by side for cfg.ablate.parity_steps steps, and measures their distances."""
    cfg = copy.deepcopy(cfg)
    cfg.seed, cfg.model.attention_dropout = seed, 0.0
    batches = Batches(corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=seed)
    arms = parity_arms(cfg, precision, corpus.tokenizer, batches, tested)
    losses: dict[str, list[float]] = {name: [] for name in arms}
    norms: dict[str, list[float]] = {name: [] for name in arms}

    def take(arm: Arm, step: int) -> None:
        arm.step(step)
        losses[arm.name].append(arm.step.loss.item())
        norms[arm.name].append(arm.update.grad_norm.item())

    first: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))  # quantities of the first step
    rows: dict[str, Tensor] = {}  # what the reference's norms put out
    for name, arm in arms.items():
        sites = row_sites(arm.state.model) if cfg.ablate.switch is Switch.norm else {}
        with unclipped_gradients(arm) as gradients, row_scales(sites, rows) as scales:
            take(arm, 0)
        for what, tensors in (("gradient", gradients), ("row scale", scales)):
            for parameter in sorted(tensors):
                first[f"{what} of {layer_of(parameter)}"][name].append(tensors[parameter])
    of_first = {arm: distances(first, arm) for arm in tested}
    first.clear()  # of each arm the size of the model
    rows.clear()
    for step in range(1, cfg.ablate.parity_steps):
        for arm in arms.values():
            take(arm, step)
    curves = {
        what: {name: [torch.tensor(values, dtype=torch.float64)] for name, values in of.items()}
        for what, of in (("loss", losses), ("gradient norm", norms))
    }
    last = {"parameters": {name: list(arm.state.model.parameters()) for name, arm in arms.items()}}
    found = {arm: distances(curves, arm) | of_first[arm] | distances(last, arm) for arm in tested}
    return SeedRun(seed, losses, found)


def distances(quantities: Quantities, tested: str) -> dict[str, Distances]:
    """Of a tested arm, by quantity."""
    found = {}
    for quantity, of in quantities.items():
        sums = Sums()
        for tensors in zip(*(of[arm] for arm in (REFERENCE, TORCH, tested, *ORDER_NAMES)), strict=True):
            sums.add(*tensors)
        found[quantity] = sums.distances()
    return found


def layer_of(parameter: str) -> str:
    """'blocks.3.mlp.up.weight' -> 'block 3', 'blocks.3.mlp_norm' -> 'norms of block 3', 'head.weight' -> 'the head'.

    Norms are layers of their own: matrices would hide them.
    """
    head, *rest = parameter.split(".")
    if head != "blocks":
        return f"the {head}".replace("_", " ")
    return f"norms of block {rest[0]}" if "norm" in parameter else f"block {rest[0]}"


def judge(runs: Sequence[SeedRun], arm: str, precision: MixedPrecision, overrides: dict[str, str]) -> Parity:
    """The verdict on a tested arm over seeds, by the statistic at the head of this file."""
    exact = "fp64" if precision.dtype is torch.float32 else "fp32"
    found = {name: [run.distances[arm][name] for run in runs] for name in runs[0].distances[arm]}
    level = LEVEL / ((2 * len(found) - 1) * len(runs[0].distances))
    sizes = [size_test(name, of, level, exact) for name, of in found.items()]
    tests = sizes + [sign_test(name, of, level) for name, of in found.items() if name != "parameters"]

    sick = [name for name in (REFERENCE, TORCH, arm, *ORDER_NAMES) if not np.isfinite([run.losses[name] for run in runs]).all()]
    failures = sorted((test for test in tests if not test.holds), key=lambda test: -test.excess)

    steps = len(runs[0].losses[TORCH])
    setting = f"over {len(runs)} seed{'s' * (len(runs) > 1)} of {steps} steps in {precision}"
    holds = None if {REFERENCE, TORCH} & {*sick} else not sick and not failures
    if holds is None:
        verdict = f"Parity can't be judged: the loss of {' and '.join(sick)} is not finite, with PyTorch's operators too."
        verdict += " A lower optim.lr may train."
    elif sick:
        verdict = f"Parity fails: the loss of {' and '.join(sick)} is not finite."
    elif failures:
        verdict = f"Parity fails: {failures[0].failure}, {setting}; {len(failures)} of {len(tests)} tests fail."
    else:
        worst = max(sizes, key=lambda size: size.tested.median)
        verdict = (
            f"Parity holds: {setting}, no quantity of {arm} is farther from {exact} than rounding explains (the "
            f"farthest: {worst.name}, {worst.tested.median:.2f} ×; {worst.beside})."
        )
        if arm == FUSED and ops.backend_for(precision.device) == "PyTorch reference":
            verdict += " No kernel ran: TRITON_INTERPRET=1 runs them on a CPU, slowly."
    return Parity(
        overrides=overrides,
        arm=arm,
        precision=str(precision),
        seeds=[run.seed for run in runs],
        steps=steps,
        quantities=tests,
        holds=holds,
        verdict=verdict,
        distances=found,
    )
