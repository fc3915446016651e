"""Parity: the true norms pass, wrong ones don't, and the statistic is what it says."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import configs
import model.norm
from ablation import parity as protocol
from ablation.arms import build, check_same_weights
from ablation.compared import FUSED, TORCH
from ablation.judgement import BIAS, MARGIN, Distances, judge_sign, judge_size, t_tail
from ablation.parity import judge, measure, parity, steps_of
from configs.machine import Machine
from configs.schema import NormImpl
from data import load_corpus
from ops import backend
from tests.ablation import faults
from training.precision import Precision

CPU = Machine("cpu")
PRECISION = {
    "fp32": Precision(torch.device("cpu"), torch.float32),
    "bf16": Precision(torch.device("cpu"), torch.bfloat16),
    "fp16": Precision(torch.device("cpu"), torch.float16),
}
BOTH = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


@pytest.fixture(scope="module")
def tiny(tiny):
    """A function: overrides -> (config, corpus)."""
    overrides = [
        *tiny,
        *(
            "train.batch_size=4",
            "model.dropout=0.1",
            "optim.warmup_steps=0",
            "eval.batches=1",
            "ablate.parity_seeds=5",
            "ablate.parity_steps=2",
        ),
    ]

    @cache  # composing takes as long as a run
    def load(*more):
        cfg = configs.load([*overrides, *more], on=CPU)
        return cfg, load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)

    return load


def found(loaded, dtype, progress=lambda steps: None):
    cfg, corpus = loaded
    return parity(cfg, PRECISION[dtype], corpus, overrides={}, progress=progress)


# ---- the true norms ----------------------------------------------------------------------------------------------------------


@BOTH
def test_the_fused_norms_pass_over_twenty_seeds_and_over_any_five_of_them(tiny, dtype):
    cfg, corpus = tiny("ablate.parity_steps=3")
    runs = [measure(cfg, seed, PRECISION[dtype], corpus, lambda steps: None) for seed in range(20)]

    assert judge(runs, PRECISION[dtype], {}).verdict.startswith("Parity holds: ")
    assert all(judge(runs[first : first + 5], PRECISION[dtype], {}).holds for first in range(16))


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        ["norm.kind=rmsnorm", "model.residual_dtype=compute"],
        ["model.block=parallel", "model.drop_path=0.2", "model.positions=rotary", "model.qk_norm=true"],
        ["train.accumulation=2", "model.dropout=0", "model.tie_embeddings=false"],
    ],
    ids=["rmsnorm", "parallel", "accumulation"],
)
def test_the_fused_norms_pass_with_the_options_of_the_model(tiny, dtype, options):
    result = found(tiny(*options), dtype)

    assert result.holds, result.verdict


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_the_kernels_pass_in_the_interpreter(tiny, monkeypatch):
    # fp32 only: the interpreter rounds to bf16 towards zero, as no GPU does, and parity would rightly object
    monkeypatch.setattr(backend, "INTERPRET", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = ("model.layers=1", "model.context=16", "train.batch_size=2", "ablate.parity_steps=1")
    result = found(tiny(*small, "ablate.parity_seeds=4"), "fp32")

    assert result.holds, result.verdict
    gradient = next(q for q in result.quantities if q.name == "gradient of block 0")
    assert gradient.fused != gradient.reordered  # so it was no comparison of a thing with itself


@pytest.mark.gpu
@BOTH
def test_the_kernels_pass_on_a_gpu(tiny, dtype):
    cfg, corpus = tiny()
    precision = Precision(torch.device("cuda"), PRECISION[dtype].dtype)
    result = parity(cfg, precision, corpus, overrides={}, progress=lambda steps: None)

    assert result.holds, result.verdict


@BOTH
def test_a_norm_made_by_hand_as_the_faulty_ones_are_passes(tiny, dtype, monkeypatch):
    monkeypatch.setattr(model.norm, "norm_fn", faults.handmade)
    result = found(tiny(), dtype)

    assert result.holds, result.verdict


def test_initial_values_are_drawn_once_a_seed(tiny, monkeypatch):
    drawn, real = [], torch.nn.init.normal_

    def normal_(tensor, *given, **named):
        if not tensor.is_meta:
            drawn.append(tensor.numel())
        return real(tensor, *given, **named)

    monkeypatch.setattr(torch.nn.init, "normal_", normal_)
    cfg, corpus = tiny()
    build("one", cfg, NormImpl.torch, PRECISION["bf16"], corpus.tokenizer.vocab_size)
    once = len(drawn)
    arms = protocol.four_arms(cfg, PRECISION["bf16"], corpus.tokenizer)
    assert once > 0 and len(drawn) == 2 * once
    check_same_weights(arms)


def test_where_memory_runs_out_all_arms_take_smaller_micro_batches_and_the_verdict_says_so(tiny, monkeypatch):
    real, tried = protocol.measure, []

    def measure(cfg, *given):
        tried.append(cfg.train.accumulation)
        if cfg.train.accumulation < 4:
            raise torch.OutOfMemoryError("tried to allocate 12 GiB")
        return real(cfg, *given)

    monkeypatch.setattr(protocol, "measure", measure)
    result = found(tiny("ablate.parity_seeds=2"), "fp32")
    assert tried == [1, 2, 4, 4] and "micro-batches cut in 4" in result.verdict

    monkeypatch.setattr(protocol, "measure", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError("still")))
    with pytest.raises(torch.OutOfMemoryError):
        found(tiny("ablate.parity_seeds=2"), "fp32")


# ---- planted faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fault"),
    [
        ("fp32", faults.wrong_eps(1e-3)),
        ("fp32", faults.wrong_eps(1.001e-5)),  # of 1e-5
        ("bf16", faults.wrong_eps(1e-3)),
        ("bf16", faults.wrong_eps(1.2e-5)),
        *((dtype, fault) for dtype in ("fp32", "bf16") for fault in (faults.bf16_statistics, faults.no_mean_term)),
        *((dtype, faults.wrong_elements) for dtype in ("fp32", "bf16")),
        ("bf16", faults.truncated),
    ],
    ids=[
        *("eps of 1e-3, fp32", "eps off by a thousandth, fp32", "eps of 1e-3, bf16", "eps off by a fifth, bf16"),
        *("bf16 statistics, fp32", "no mean term, fp32", "bf16 statistics, bf16", "no mean term, bf16"),
        *("wrong elements, fp32", "wrong elements, bf16", "rounding towards zero, bf16"),
    ],
)
def test_a_planted_fault_fails_parity(tiny, dtype, fault, monkeypatch):
    monkeypatch.setattr(model.norm, "norm_fn", fault)
    result = found(tiny(), dtype)

    assert not result.holds
    assert result.verdict.startswith("Parity fails: ") and " × " in result.verdict


@pytest.mark.parametrize("fault", [None, faults.bf16_statistics, faults.no_mean_term], ids=["none", "statistics", "mean term"])
def test_what_hides_best_in_a_small_model_is_found_at_the_width_of_gpt2_too(tiny, fault, monkeypatch):
    if fault is not None:
        monkeypatch.setattr(model.norm, "norm_fn", fault)
    result = found(tiny("model.width=768", "model.heads=12", "model.layers=1"), "bf16")

    assert result.holds == (fault is None), result.verdict


@pytest.mark.parametrize("fault", [faults.wrong_eps(1e-3), faults.no_mean_term, faults.wrong_elements])
def test_one_seed_shows_a_gross_fault(tiny, fault, monkeypatch):
    assert found(tiny("ablate.parity_seeds=1"), "bf16").holds
    monkeypatch.setattr(model.norm, "norm_fn", fault)

    assert not found(tiny("ablate.parity_seeds=1"), "bf16").holds


def test_a_fault_at_one_seed_of_many_is_not_lost_in_its_spread(tiny, monkeypatch):
    monkeypatch.setattr(protocol, "measure", measure_with_a_fault_at(3))
    result = found(tiny(), "bf16")

    assert not result.holds


def measure_with_a_fault_at(seed):
    def measured(cfg, at, *rest):
        with pytest.MonkeyPatch.context() as patch:
            if at == seed:
                patch.setattr(model.norm, "norm_fn", faults.wrong_elements)
            return measure(cfg, at, *rest)

    return measured


def test_losses_that_are_no_numbers_fail(tiny, monkeypatch):
    monkeypatch.setattr(model.norm, "norm_fn", faults.no_number)
    result = found(tiny(), "fp32")

    assert not result.holds
    assert result.verdict == "Parity fails: the loss of fused is not finite."
    assert all(math.isfinite(x) for q in result.quantities for x in (q.fused.low, q.fused.median, q.fused.high))


# ---- the protocol ------------------------------------------------------------------------------------------------------------


def test_arms_share_weights_batches_and_masks(tiny):
    result = found(tiny(), "bf16")

    assert set(result.losses) == set(result.val_loss) == set(protocol.ARMS)
    for first in zip(*(result.losses[arm] for arm in protocol.ARMS), strict=True):  # by seed
        assert [losses[0] for losses in first] == pytest.approx([first[0][0]] * 4, rel=1e-4)
    assert len({losses[0] for losses in result.losses[TORCH]}) == 5  # seeds differ
    assert all(result.losses["reference"] != result.losses[arm] for arm in protocol.ARMS[1:])
    assert (result.seeds, result.steps, result.precision) == ([1, 2, 3, 4, 5], 2, "bf16")


def test_gradients_of_every_step_and_what_the_tests_are_made_of_are_kept(tiny):
    result = found(tiny(), "bf16")

    assert set(result.gradient_norms) == set(protocol.ARMS) and set(result.gradient_errors) == set(protocol.ARMS[1:])
    layers = {name.removeprefix("gradient of ") for name in result.distances if name.startswith("gradient of ")}
    for runs in result.gradient_errors.values():
        assert [len(run) for run in runs] == [result.steps] * 5
        assert all(set(step) == layers and 0 < min(step.values()) <= max(step.values()) < 0.1 for run in runs for step in run)
    assert result.gradient_errors[FUSED] != result.gradient_errors[TORCH]
    for quantity in result.quantities[: len(result.distances)]:  # the mean of log R over seeds, as the report has it
        again = np.exp(np.mean(np.log([one.fused for one in result.distances[quantity.name]])))
        assert quantity.fused.median == pytest.approx(again)


def test_a_fault_that_comes_after_the_first_step_shows_in_the_gradients_of_its_step(tiny, monkeypatch):
    cfg, corpus = tiny("ablate.parity_seeds=1")
    real, seen = protocol.training_step, []

    def late(forward, state, batch, step, *rest):
        seen.append(step)
        if step == 1 and seen.count(1) == 3:  # the fused arm's turn
            with torch.no_grad():
                next(state.model.parameters()).mul_(1.5)
        return real(forward, state, batch, step, *rest)

    monkeypatch.setattr(protocol, "training_step", late)
    result = parity(cfg, PRECISION["fp32"], corpus, overrides={}, progress=lambda steps: None)
    (fused,), (reordered,) = result.gradient_errors[FUSED], result.gradient_errors[protocol.REORDERED]
    assert max(fused[0].values()) < 1e-3 and max(reordered[1].values()) < 1e-3
    assert max(fused[1].values()) > 0.01


def test_progress_counts_every_training_step(tiny):
    done = []
    cfg, corpus = tiny("ablate.parity_seeds=2", "ablate.parity_steps=3")
    parity(cfg, PRECISION["bf16"], corpus, overrides={}, progress=done.append)

    assert sum(done) == steps_of(cfg) == 4 * 2 * 3


def test_the_callers_config_and_random_state_decide_nothing(tiny):
    cfg, corpus = tiny("ablate.parity_seeds=2")
    before = configs.to_dict(cfg)
    first = parity(cfg, PRECISION["fp32"], corpus, overrides={"model.dropout": "0.1"}, progress=lambda steps: None)
    torch.manual_seed(1234)
    second = parity(cfg, PRECISION["fp32"], corpus, overrides={"model.dropout": "0.1"}, progress=lambda steps: None)

    assert first == second and configs.to_dict(cfg) == before
    assert first.overrides == {"model.dropout": "0.1"}


def test_fp16_is_judged_without_skipped_steps(tiny):
    result = found(tiny(), "fp16")

    assert result.holds, result.verdict
    moved = next(q for q in result.quantities if q.name == "parameters")
    assert moved.fused.median < 2


def test_no_seeds_is_an_error(tiny):
    with pytest.raises(ValueError, match="parity_seeds must be 1 or more, got 0"):
        found(tiny("ablate.parity_seeds=0"), "fp32")


# ---- the statistic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "t", "tail"),  # from tables of Student's t
    [
        (1, 1.0, 0.25),
        (1, 31.821, 0.01),
        (2, 9.925, 0.005),
        (3, 5.841, 0.005),
        (4, 2.132, 0.05),
        (4, 7.173, 0.001),
        (19, 2.093, 0.025),
    ],
)
def test_the_tail_of_students_t_is_that_of_the_tables(degrees, t, tail):
    assert t_tail(t, degrees) == pytest.approx(tail, rel=2e-3)
    assert t_tail(-t, degrees) == pytest.approx(1 - tail, rel=2e-3)


def made_up(draw, seeds, ratio=1.0, shift=0.0):
    """Distances of a fused arm that is `ratio` times as far as the reordered one, and seeds that scatter by a fifth."""
    return [
        Distances(ratio * math.exp(draw.normal(0, 0.2)), 1.0, shift + draw.normal(0, 0.2), draw.normal(0, 0.2))
        for _ in range(seeds)
    ]


def test_a_correct_norm_fails_no_more_often_than_the_level(seeds=5, level=0.01):
    draw = np.random.default_rng(0)
    repeats = [made_up(draw, seeds, MARGIN, BIAS) for _ in range(2000)]  # at the very edge

    for judged in (lambda one: judge_size("loss", one, level, "fp32"), lambda one: judge_sign("loss", one, level)):
        assert np.mean([not judged(one).quantity.holds for one in repeats]) < 1.8 * level


def test_a_wrong_norm_fails_by_size_or_by_sign():
    draw = np.random.default_rng(1)
    far, shifted = made_up(draw, 5, ratio=6.0), made_up(draw, 5, shift=3.0)

    assert not judge_size("loss", far, 1e-3, "fp32").quantity.holds and judge_sign("loss", far, 1e-3).quantity.holds
    assert judge_size("loss", shifted, 1e-3, "fp32").quantity.holds and not judge_sign("loss", shifted, 1e-3).quantity.holds


@pytest.mark.parametrize("seeds", range(1, 7))
def test_fourteen_times_the_expected_error_fails_at_any_number_of_seeds(seeds, level=1e-4):
    """Of four seeds that scatter the t-test alone would let it pass."""
    errors = [14.0 * scatter for scatter in (1.6, 0.7, 1.4, 0.8, 1.2, 0.9)][:seeds]

    assert not judge_size("loss", [Distances(e, 1.0, 0.0, 0.1) for e in errors], level, "fp32").quantity.holds
    assert not judge_sign("loss", [Distances(1.0, 1.0, e, 0.1) for e in errors], level).quantity.holds


@pytest.mark.parametrize(("gap", "holds"), [(0.001, True), (0.5, False)])
def test_validation_losses_must_differ_by_less_than_seeds_do(tiny, gap, holds):
    cfg, corpus = tiny("ablate.parity_steps=1")
    runs = [measure(cfg, seed, PRECISION["fp32"], corpus, lambda steps: None) for seed in range(4)]
    runs = [
        replace(run, val_loss=run.val_loss | {TORCH: 3.0 + 0.1 * i, FUSED: 3.0 + 0.1 * i + gap}) for i, run in enumerate(runs)
    ]
    result = judge(runs, PRECISION["fp32"], {})

    assert result.holds == holds and result.val_spread == pytest.approx(0.129, abs=1e-3)
    assert ("validation losses differ by +0.5" in result.verdict) != holds


def test_validation_losses_of_two_or_three_seeds_that_are_close_by_chance_fail_nothing(tiny):
    cfg, corpus = tiny("ablate.parity_steps=1")
    runs = [measure(cfg, seed, PRECISION["fp32"], corpus, lambda steps: None) for seed in range(4)]
    # seeds that are 1e-3 apart, and differences that scatter by 3e-4 around zero, as those of true norms in bf16 do
    found = ((3.000, 3.0003), (3.001, 3.0007), (3.0005, 3.0008), (3.0015, 3.0012))
    runs = [replace(run, val_loss=run.val_loss | {TORCH: a, FUSED: b}) for run, (a, b) in zip(runs, found, strict=True)]

    for seeds in (2, 3):
        result = judge(runs[:seeds], PRECISION["fp32"], {})
        assert result.holds, result.verdict
        assert "of 3 seeds or fewer is no measure" in result.verdict
    assert not judge([*runs[:3], replace(runs[3], val_loss=runs[3].val_loss | {FUSED: 3.5})], PRECISION["fp32"], {}).holds
