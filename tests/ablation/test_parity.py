"""Parity: the true norms pass, wrong ones don't, and the statistic is what it says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import model.loss
import model.mlp
import model.norm
import model.sites
from ablation.config import Config
from ablation.parity import judge, run_seed
from ablation.parity_arms import ORDER_NAMES
from ablation.rounding import BIAS, MARGIN, REFERENCE, Distances, sign_test, size_test
from ablation.variants import Variant
from data import load_corpus
from measure.comparison import FUSED, TORCH
from ops import norm_fn
from tests.ablation import faults
from tests.runs import composed, precision

PRECISION = {name: precision(getattr(torch, name)) for name in ("float32", "bfloat16", "float16")}
FP32, BF16 = "float32", "bfloat16"
ARMS = (REFERENCE, TORCH, FUSED, *ORDER_NAMES)
KEYS = ("train.batch_size=4", "model.dropout=0.1", "optim.warmup_steps=0", "ablate.arms=[torch,fused]")
KEYS += ("ablate.parity_seeds=4", "ablate.parity_steps=2")


@pytest.fixture(scope="module")
def parity(tiny):
    """parity(dtype, *overrides): the verdict on each tested arm."""

    def verdicts(dtype, *more, device="cpu"):
        cfg, corpus = loaded(tiny, *more)
        settled, arms = replace(PRECISION[dtype], device=torch.device(device)), Variant(cfg, {}, {}).tested
        runs = [run_seed(cfg, cfg.seed + number, settled, corpus, arms) for number in range(cfg.ablate.parity_seeds)]
        return [judge(runs, arm, settled, {}) for arm in arms]

    return verdicts


def loaded(tiny, *more):
    cfg = composed([*tiny, *KEYS, *more], Config)
    return cfg, load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)


def test_the_fused_norms_pass_over_six_seeds_and_over_any_four_of_them(tiny):
    cfg, corpus = loaded(tiny)
    runs = [run_seed(cfg, seed, PRECISION[BF16], corpus, [FUSED]) for seed in range(1, 7)]
    whole = judge(runs, FUSED, PRECISION[BF16], {})
    assert whole.verdict.startswith("Parity holds: ") and "No kernel ran" in whole.verdict
    assert whole.seeds == list(range(1, 7))
    assert all(judge(runs[first : first + 4], FUSED, PRECISION[BF16], {}).holds for first in range(3))
    one, other = runs[:2]
    assert [one.losses[arm][0] for arm in ARMS] == pytest.approx([one.losses[TORCH][0]] * len(ARMS), rel=1e-4)
    assert one.losses[TORCH] != other.losses[TORCH] and len({tuple(one.losses[arm]) for arm in ARMS}) > 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_kernels_pass_on_a_gpu(parity, dtype):
    (result,) = parity(dtype, device="cuda")
    assert result.holds


WIDE = ("model.width=256", "model.heads=4", "model.layers=1", "ablate.parity_steps=1", "ablate.parity_seeds=2")
MLP = ("ablate.switch=mlp", "model.activation=swiglu")
LOSS, CAPPED = "ablate.switch=loss", ("loss.softcap=20.0", "loss.z_loss=1e-3")
RIGHT = (None, faults.handmade)  # made as the faulty ones are


@pytest.mark.parametrize(
    ("fault", "dtype", "keys"),
    [
        (None, BF16, ("norm.kind=rmsnorm", "model.residual_dtype=compute")),
        (None, FP32, ("model.block=parallel", "model.drop_path=0.2", "model.positions=rotary", "model.qk_norm=true")),
        (None, "float16", ("train.accumulation=2", "model.dropout=0", "model.tie_embeddings=false")),
        (faults.handmade, BF16, ()),
        (faults.with_options(norm_fn, eps=1.001e-5), FP32, ()),  # of 1e-5; in bf16 that is below a rounding step
        (faults.with_options(norm_fn, eps=1.2e-5), BF16, ()),
        (faults.bf16_statistics, BF16, ()),
        (faults.no_mean_term, FP32, ()),
        (faults.weight_gradient_off, BF16, ()),
        (faults.truncated, BF16, ()),
        *((fault, BF16, ("ablate.parity_seeds=1",)) for fault in (None, faults.wrong_elements)),
        (faults.bf16_statistics, BF16, WIDE),  # what hides best in a small model
        (None, FP32, (LOSS, *CAPPED, "loss.chunks=4")),
        (None, "float16", (LOSS, "loss.chunks=4", "train.accumulation=2", "model.tie_embeddings=false")),
        (faults.loss_regularised, BF16, (LOSS,)),
        (faults.loss_gradient_off, BF16, (LOSS,)),
        (None, BF16, MLP),
        (faults.gate_in_bf16, FP32, MLP),
        (faults.gate_gradient_off, BF16, MLP),
    ],
)
def test_a_planted_fault_fails_parity_and_norms_and_losses_pass_with_any_options(parity, fault, dtype, keys, monkeypatch):
    module, operator = model.sites, "norm_fn"
    if LOSS in keys:
        module, operator = model.loss, "linear_cross_entropy_fn"
    elif keys == MLP:
        module, operator = model.mlp, "gated_activation_fn"
    monkeypatch.setattr(module, operator, fault or getattr(module, operator))
    seeds = () if fault else ("ablate.parity_seeds=2",)  # finding a fault takes four
    (result,) = parity(dtype, *seeds, *keys)
    assert result.holds == (fault in RIGHT), result.verdict
    assert result.holds or (result.verdict.startswith("Parity fails: ") and " × " in result.verdict)
    assert {"loss", "gradient norm", "gradient of the final norm", "parameters"} <= set(result.distances)
    moved = any(one.reordered_shift for of in result.distances.values() for one in of)
    # of a loss in fp16 the other orders change a last bit of fp32, which the step may round away
    assert moved or (dtype == "float16" and LOSS in keys), "the other order is another one"


def test_losses_that_are_no_numbers_fail(parity, monkeypatch):
    monkeypatch.setattr(model.sites, "norm_fn", faults.no_number)
    (result,) = parity(FP32, "ablate.parity_seeds=2")
    assert not result.holds and result.verdict == "Parity fails: the loss of fused is not finite."
    assert all(math.isfinite(x) for q in result.quantities for x in (q.tested.low, q.tested.median, q.tested.high))


def made_up(draw, seeds, ratio=1.0, shift=0.0):
    """Distances of a fused arm that is `ratio` times as far as the reordered one, and seeds that scatter by a fifth."""
    return [
        Distances(ratio * math.exp(draw.normal(0, 0.2)), 1.0, shift + draw.normal(0, 0.2), draw.normal(0, 0.2))
        for _ in range(seeds)
    ]


def test_a_correct_norm_fails_no_more_often_than_the_level(seeds=5, level=0.01):
    draw = np.random.default_rng(0)
    repeats = [made_up(draw, seeds, MARGIN, BIAS) for _ in range(2000)]  # at the very edge
    for judged in (lambda one: size_test("loss", one, level, "fp32"), lambda one: sign_test("loss", one, level)):
        assert np.mean([not judged(one).holds for one in repeats]) < 1.8 * level


def test_a_wrong_norm_fails_by_size_or_by_sign_and_ten_times_the_expected_error_at_any_number_of_seeds():
    draw = np.random.default_rng(1)
    far, shifted = [], []
    for seeds, ratio, shift in ((5, 6.0, 3.0), (8, 2.0, 1.0)):
        far.append((made_up(draw, seeds, ratio=ratio), 1e-3))
        shifted.append((made_up(draw, seeds, shift=shift), 1e-3))
    for seeds in range(1, 7):  # of four seeds that scatter as these do the t-test alone would let fourteen times pass
        errors = [14.0 * scatter for scatter in (1.6, 0.7, 1.4, 0.8, 1.2, 0.9)][:seeds]
        far.append(([Distances(e, 1.0, 0.0, 0.1) for e in errors], 1e-4))
        shifted.append(([Distances(1.0, 1.0, e, 0.1) for e in errors], 1e-4))
    errors = [50.0 if seed == 3 else 1.0 for seed in range(8)]  # one of many is not lost in the spread that it makes
    far.append(([Distances(e, 1.0, 0.0, 0.1) for e in errors], 1e-4))
    shifted.append(([Distances(1.0, 1.0, e, 3.0) for e in errors], 1e-4))
    for is_far, distances, level in [*((True, *one) for one in far), *((False, *one) for one in shifted)]:
        holds = [size_test("loss", distances, level, "fp32").holds, sign_test("loss", distances, level).holds]
        assert holds == [not is_far, is_far]


def test_several_arms_are_tested_in_one_run_each_by_itself(parity, monkeypatch):
    """Of two arms one has a mistake in it: torch's site, with a wrong eps, in the place of a compiled one."""
    monkeypatch.setattr(
        model.norm, "compiled_alone", lambda site: lambda inputs, affine, how: site(inputs, affine, how._replace(eps=1e-3))
    )
    wrong, right = parity(FP32, "ablate.arms=[torch,compiled,fused]")
    assert (wrong.arm, right.arm) == ("compiled", FUSED)
    assert right.holds and not wrong.holds
