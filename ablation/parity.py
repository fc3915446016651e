"""Loss parity: whether what is compared, norms or losses, is wrong, or merely rounded elsewhere.

Two correct programs may give different bits, so a comparison needs a tolerance. A tolerance that was tuned until tests pass
proves nothing; this one is measured. Arms train from the same weights, on the same batches, with the same dropout masks:

    a   reference   PyTorch's operators; weights, products and residual stream in fp32 (in fp64 where the run itself is in fp32)
    b   torch       PyTorch's operators in the run's precision
    c   tested      fused ones in the run's precision (where no kernel runs, their PyTorch reference); each other arm likewise
    d   reordered   as b, with the sums of its norms, or of its loss, in another, just as legitimate order

The tests are of these quantities: the loss and the gradient norm over all steps; at the first step, where all arms have the
same weights, the gradient of every layer, and of norms the scale ⟨y, y_a⟩ / ⟨y_a, y_a⟩ of every row y that they put out; and
the parameters after the last step.
(The statistics of a row decide its scale. A mistake in them is the same all along the row, and the rounding of single elements
to bf16 would hide it.) Seeds differ in batches and masks, and in weights unless init_from gives them. For each quantity and
seed, over the elements of the quantity:

    D_x = rms(x − a)    expected = √(D_b² + rms(d − b)²)    R_c = D_c / expected    R_d = D_d / expected
    S_x = ⟨x − b, a⟩ / ⟨a, a⟩ · rms(a) / expected                   what all elements have in common, which rms hides in noise

(No D, and no allowed shift, is less than a unit in the last place of fp32, ε · rms(a): 2⁻²³ of the quantity's size.)

`expected` is the error that the run's rounding and another order explain, so R is near 1 or below for a correct operator.

**Size.** The tested arm may be farther from the reference than the reordered arm by the factor MARGIN, as it also rounds in
other places. It fails if log R_c − log R_d is above log MARGIN: a one-sided t-test over seeds.

**Sign.** Rounding errors have random signs, a wrong formula has the same at every seed. It fails if the mean of S_c
over seeds is farther from 0 than BIAS: a two-sided t-test, with a standard deviation no smaller than the rms of S_d, so that
seeds which agree by chance don't make a verdict. Not for parameters: their a is mostly their initial value.

Level: LEVEL for a run of the protocol, hence LEVEL / number of tests for each (Bonferroni); it holds whatever the tests have in
common. A t-test and not a permutation or a bootstrap: five seeds have 2⁵ signs, so no permutation test could reach such a
level. It takes log R to be near normal over seeds, which an rms over many elements is.

Two guards have no level, because a t-test over few seeds can't see their cases. First, a failure at one seed of many widens
the spread that hides it: so a seed fails if its tested arm is GROSS times as far as the reordered one, or shifted by as much.
Second, the mean over seeds must stay below GROSS_FEW: FEW seeds or fewer have no t-test, and with a few more the spread is
estimated so roughly that a t-test alone would let ten times the expected error pass.

**Outcome.** The 95 % t-interval of the mean difference tested − torch of final validation losses must lie within ± the standard
deviation of torch's over seeds. With FEW seeds or less this is left out: of two, that deviation may be near 0 by chance, and
half the interval is 9 times that of the differences. Right norms whose losses differ by a hundredth of what seeds differ by
would fail one time in 16, by a twentieth two times in seven (GPT-2 in bf16: a fiftieth with dropout, a fifteenth without).

Dropout on attention weights is off in all arms. It draws from torch's generator, and what it draws depends on the dtype.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

import ops
from ablation.arms import Arm
from ablation.parity_arms import parity_arms, row_sites, unclipped_gradients
from ablation.records import Parity
from ablation.rounding import (
    FEW,
    LEVEL,
    REFERENCE,
    REORDERED,
    Distances,
    Sums,
    other_order,
    row_scales,
    sign_test,
    size_test,
)
from ablation.variants import Variant
from configs import Config
from configs.schema import Switch
from data import Batches, Corpus
from measure.comparison import FUSED, TORCH
from measure.statistics import mean_interval
from train import training_step
from training.metrics import evaluate
from training.step import MixedPrecision

T = TypeVar("T")
EVAL_BATCHES = 8  # unless the config says
SUMMED = {Switch.norm: "norms", Switch.loss: "loss"}  # what is compared, in words


@dataclass(frozen=True)
class SeedRun:
    """What the arms did at one seed."""

    seed: int
    losses: dict[str, list[float]]  # by arm: for each step; nats per token
    distances: dict[str, dict[str, Distances]]  # by tested arm, by quantity
    val_loss: dict[str, float]  # by arm


def parity(variant: Variant, precision: MixedPrecision, corpus: Corpus) -> list[Parity]:
    """Runs the protocol at the head of this file for the variant's tested arms, in the run's precision. There is a verdict on
    each arm.

    Raises:
        ValueError: the model's options do not fit together or the corpus is too short.
    """
    cfg, tested = variant.cfg, variant.tested
    runs = [measure(cfg, cfg.seed + number, precision, corpus, tested) for number in range(cfg.ablate.parity_seeds)]
    what = SUMMED[cfg.ablate.switch]
    found = [judge(runs, arm, precision, variant.overrides, what) for arm in tested]
    if ops.backend_for(precision.device) == "PyTorch reference":
        # Fused norms are PyTorch's operators then; the fused loss has a backward of its own.
        same = "identical, as" if what == "norms" else "within rounding, though"
        said = f"Parity holds: {same} no kernel ran (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly); "
        found = [replace(f, verdict=f.verdict.replace("Parity holds: ", said)) if f.arm == FUSED else f for f in found]
    return found


def measure(cfg: Config, seed: int, precision: MixedPrecision, corpus: Corpus, tested: Sequence[str]) -> SeedRun:
    """Trains the arms side by side for cfg.ablate.parity_steps steps, and measures their distances."""
    cfg = copy.deepcopy(cfg)
    cfg.seed = seed
    cfg.model = replace(cfg.model, attention_dropout=0.0)
    arms = parity_arms(cfg, precision, corpus.tokenizer, tested)
    batches = Batches(corpus.train.tokens, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=seed)

    losses: dict[str, list[float]] = {name: [] for name in arms}
    norms: dict[str, list[float]] = {name: [] for name in arms}
    gradients: dict[str, dict[str, Tensor]] = {}  # of the first step; of each arm the size of the model
    scales: dict[str, dict[str, Tensor]] = {}
    rows: dict[str, Tensor] = {}  # what the reference's norms put out
    distances: dict[str, dict[str, Distances]] = {}

    def take(arm: Arm, step: int) -> None:
        loss, norm = training_step(arm.forward, arm.state, batches[step], step, arm.cfg, arm.precision)
        losses[arm.name].append(loss.item())
        norms[arm.name].append(norm.item())

    for name, arm in arms.items():
        sites = row_sites(arm.state.model) if cfg.ablate.switch is Switch.norm else {}
        with unclipped_gradients(arm) as gradients[name], row_scales(sites, rows) as scales[name]:
            take(arm, 0)
    for name in tested:
        distances[name] = {f"gradient of {layer}": one for layer, one in layers(four(gradients, name)).items()}
        distances[name] |= {f"row scale of {layer}": one for layer, one in layers(four(scales, name)).items()}
    del gradients, scales, rows
    for step in range(1, cfg.ablate.parity_steps):
        for arm in arms.values():
            take(arm, step)
    curves = {"loss": losses, "gradient norm": norms}
    for name in tested:
        of_steps = {
            what: distance([[torch.tensor(of, dtype=torch.float64)] for of in four(curve, name)])
            for what, curve in curves.items()
        }
        weights = [arm.state.model.parameters() for arm in four(arms, name)]
        distances[name] = of_steps | distances[name] | {"parameters": distance(weights)}
    return SeedRun(seed, losses, distances, {name: validate(arm, corpus) for name, arm in arms.items()})


def four(of: Mapping[str, T], tested: str) -> list[T]:
    """a, b, c and d of a tested arm."""
    return [of[name] for name in (REFERENCE, TORCH, tested, REORDERED)]


def validate(arm: Arm, corpus: Corpus) -> float:
    """Nats per token."""
    return evaluate(
        arm.state.model,
        corpus.val,
        arm.precision,
        context=arm.cfg.model.context,
        batch_size=arm.cfg.train.batch_size // arm.cfg.train.accumulation,
        batches=arm.cfg.eval.batches or EVAL_BATCHES,
    ).loss


# ---- distances ---------------------------------------------------------------------------------------------------------------


def distance(arms: Sequence[Iterable[Tensor]]) -> Distances:
    """Of the same tensors of a, b, c and d, as one quantity."""
    sums = Sums()
    for tensors in zip(*arms, strict=True):
        sums.add(*tensors)
    return sums.distances()


def layers(tensors: Sequence[dict[str, Tensor]]) -> dict[str, Distances]:
    """By layer, of tensors by name of a, b, c and d. Norms are layers of their own: matrices would hide them."""
    names: dict[str, list[str]] = {}
    for name in tensors[0]:
        names.setdefault(layer_of(name), []).append(name)
    return {layer: distance([[arm[name] for name in of] for arm in tensors]) for layer, of in names.items()}


def layer_of(parameter: str) -> str:
    """'blocks.3.mlp.up.weight' -> 'block 3', 'blocks.3.mlp_norm' -> 'norms of block 3', 'head.weight' -> 'the head'."""
    head, *rest = parameter.split(".")
    if head != "blocks":
        return f"the {head}".replace("_", " ")
    return f"norms of block {rest[0]}" if "norm" in parameter else f"block {rest[0]}"


# ---- verdict -----------------------------------------------------------------------------------------------------------------


def judge(
    runs: Sequence[SeedRun], arm: str, precision: MixedPrecision, overrides: dict[str, str], what: str = SUMMED[Switch.norm]
) -> Parity:
    """The verdict on a tested arm over seeds, by the statistic at the head of this file."""
    exact = "fp64" if precision.dtype is torch.float32 else "fp32"
    arms = (REFERENCE, TORCH, arm, REORDERED)
    distances = [run.distances[arm] for run in runs]
    names = list(distances[0])
    level = LEVEL / (2 * len(names) - 1)
    tests = [size_test(name, [one[name] for one in distances], level, exact, what) for name in names]
    tests += [sign_test(name, [one[name] for one in distances], level, what=what) for name in names if name != "parameters"]

    val_loss = {name: [run.val_loss[name] for run in runs] for name in arms}
    difference = mean_interval(np.subtract(val_loss[arm], val_loss[TORCH]))
    spread = float(np.std(val_loss[TORCH], ddof=1)) if len(runs) > 1 else 0.0
    outcome = len(runs) <= FEW or (-spread <= difference.low and difference.high <= spread)
    sick = [name for name in arms if not np.isfinite([run.losses[name] for run in runs]).all()]

    failures = sorted((test for test in tests if not test.quantity.holds), key=lambda test: -test.excess)
    setting = f"over {len(runs)} seed{'s' * (len(runs) > 1)} of {len(runs[0].losses[TORCH])} steps in {precision}"
    val = (
        f"final validation losses differ by {difference.median:+.2g} [{difference.low:+.2g}, {difference.high:+.2g}] nats "
        f"({arm} − torch), torch's spread by {spread:.2g} over seeds"
        + (f", which of {FEW} seeds or fewer is no measure to judge it by" if len(runs) <= FEW else "")
    )
    if sick:
        verdict = f"Parity fails: the loss of {' and '.join(sick)} is not finite."
    elif failures:
        verdict = f"Parity fails: {failures[0].failure}, {setting}; {len(failures)} of {len(tests)} tests fail."
    elif not outcome:
        verdict = f"Parity fails: {val}."
    else:
        worst = max((test.quantity for test in tests[: len(names)]), key=lambda q: q.tested.median / q.reordered.median)
        verdict = (
            f"Parity holds: {setting}, no quantity of {arm} is farther from {exact} than rounding explains (largest beside "
            f"another order of sums: {worst.name}, {worst.tested.median:.2f} ×; {other_order(worst, what)}); {val}."
        )
    return Parity(
        overrides=overrides,
        arm=arm,
        precision=str(precision),
        seeds=[run.seed for run in runs],
        steps=len(runs[0].losses[TORCH]),
        quantities=[test.quantity for test in tests],
        val_loss=val_loss,
        val_difference=difference,
        val_spread=spread,
        holds=not sick and not failures and outcome,
        verdict=verdict,
        distances={name: [one[name] for one in distances] for name in names},
    )
