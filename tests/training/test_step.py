"""One training step: micro-batches, loss scales, clipping, learning rates, seeds, and which parameters decay."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

import configs
from configs.machine import Machine
from configs.schema import OptimConfig, Schedule
from model import GPT
from tests.runs import ROOT, bits, composed, corpus
from train import learning_rate, training_step
from training.build import compile_model
from training.checkpoint import TrainState
from training.optimizer import adamw, parameter_groups
from training.precision import MixedPrecision
from training.step import seed_micro_batch


def gpt(overrides):
    cfg = composed(overrides)
    torch.manual_seed(0)
    return cfg, GPT(cfg.model, cfg.norm, vocab_size=20)


def one_step(overrides, batch, scaled=False):
    cfg, model = gpt(overrides)
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", enabled=scaled), tokenizer="")
    seen = {}
    state.optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters()}))
    loss, grad_norm = training_step(model, state, batch, 0, cfg, MixedPrecision(torch.device("cpu"), torch.float32))
    return loss, grad_norm, seen, model


def draw(generator):
    return tuple(torch.randint(20, (8, 32), generator=generator) for _ in range(2))


@pytest.fixture
def batch():
    return draw(torch.Generator().manual_seed(1))


@pytest.mark.parametrize("clip_norm", [0, 0.01])
def test_a_gradient_is_clipped_after_its_norm_is_measured_also_with_a_scaler_and_in_pieces(tiny, batch, clip_norm):
    overrides = [*tiny, f"optim.clip_norm={clip_norm}"]
    loss, norm, grads, _ = one_step(overrides, batch)
    left = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    assert norm > 0.1 and left == pytest.approx(clip_norm or norm.item(), rel=1e-3)
    for pieces, scaled, atol in ((1, True, 1e-8), (2, False, 1e-6), (8, True, 1e-6)):
        other_loss, other_norm, other, _ = one_step([*overrides, f"train.accumulation={pieces}"], batch, scaled)
        torch.testing.assert_close((other_loss, other_norm), (loss, norm))
        for name, grad in grads.items():
            torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=atol, msg=name)


def test_the_step_uses_the_rate_of_the_schedule(tiny, batch):
    moved = one_step([*tiny, "optim.lr=1e-3", "optim.min_lr=0"], batch)[3]
    _, start = gpt(tiny)
    distance = (moved.blocks[0].mlp.down.weight - start.blocks[0].mlp.down.weight).abs().max().item()
    assert distance == pytest.approx(1e-3 / 3, rel=0.05), "Adam's first step is the rate; warm-up starts at a third of it"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gradients_are_there_before_the_first_backward_pass_where_cuda_graphs_would_overwrite_them(tiny, batch, mode):
    cfg, model = gpt([*tiny, "train.accumulation=2"])
    cfg.train.compile, cfg.train.compile_mode = True, mode
    state, there = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", enabled=False), tokenizer=""), []
    model.register_forward_pre_hook(lambda *_: there.append(model.embedding.weight.grad is not None))
    training_step(model, state, batch, 0, cfg, MixedPrecision(torch.device("cpu"), torch.float32))
    assert there == [mode == "reduce-overhead", True]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_cuda_graphs_give_the_losses_of_the_compiled_model(tiny, impl, accumulation):
    # shared masks, since a graph draws torch's own elsewhere in the generator's stream
    given = [o for o in tiny if o != "device=cpu"] + ["model.dropout=0.1", "model.attention_dropout=0", f"norm.impl={impl}"]
    given.append(f"train.accumulation={accumulation}")
    precision, found = MixedPrecision(torch.device("cuda"), torch.bfloat16), []
    for mode in ("reduce-overhead", "default"):
        torch.compiler.reset()
        on_gpu = ["device=cuda", "norm.dropout_masks=shared", "train.compile=true", f"train.compile_mode={mode}"]
        cfg = configs.load([*given, *on_gpu], on=Machine("cuda"))
        torch.manual_seed(0)
        model = GPT(cfg.model, cfg.norm, vocab_size=20).cuda()
        state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
        forward = compile_model(model, cfg.train)
        generator = torch.Generator().manual_seed(1)
        steps = [training_step(forward, state, draw(generator), step, cfg, precision) for step in range(8)]
        found.append(torch.stack([torch.stack(pair) for pair in steps]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("variant", ["model.qk_norm=true", "norm.kind=rmsnorm", "model.tie_embeddings=false"])
def test_both_implementations_start_alike_with_each_parameter_in_one_group_and_matrices_alone_decay(tiny, variant):
    (cfg, fused), (_, plain) = (gpt([*tiny, variant, f"norm.impl={i}"]) for i in ("fused", "torch"))
    decayed, kept = adamw(fused, cfg.optim).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (cfg.optim.weight_decay, 0.0)
    for group, matrices in ((decayed, True), (kept, False)):
        assert {id(p) for p in group["params"]} == {id(p) for p in fused.parameters() if (p.ndim > 1) == matrices}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(fused.parameters()))
    for ours, theirs in zip(parameter_groups(fused), parameter_groups(plain), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"min_lr": 1e-4}, {0: 1e-4, 4: 5e-4, 9: 1e-3, 33: 1e-4 + 9e-4 * (1 + math.cos(math.pi * 23 / 90)) / 2, 100: 1e-4}),
        ({"min_lr": 1e-4, "warmup_steps": 0}, {50: 5.5e-4, 100: 1e-4}),
        ({"min_lr": None, "schedule": Schedule.wsd}, {100: 1e-4}),  # a tenth of its peak
        ({"min_lr": 0.0, "schedule": Schedule.wsd, "decay_fraction": 0.2}, {80: 1e-3, 85: 7.5e-4, 95: 2.5e-4, 100: 0}),
        ({"min_lr": 0.0, "schedule": Schedule.wsd, "decay_fraction": 1.0, "warmup_steps": 60}, {59: 1e-3, 60: 1e-3, 80: 5e-4}),
        ({"schedule": Schedule.constant}, {10: 1e-3, 99: 1e-3}),
        ({"warmup_steps": None}, {0: 2e-4, 4: 1e-3}),  # a twentieth of the steps
    ],
)
def test_the_rate_follows_its_formula(given, rates):
    optim = OptimConfig(**{"lr": 1e-3, "warmup_steps": 10, **given})
    assert {step: learning_rate(step, 100, optim) for step in rates} == pytest.approx(rates)


def test_each_place_has_other_seeds_all_positive_int64_and_seeds_torch():
    draws = [(seed_micro_batch(1, step, 0, 0, 9, torch.device("cpu")), torch.rand(3))[1] for step in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    places = itertools.product((1, 2), range(10), range(4), range(4))  # seed, step, micro-batch, rank
    seeds = torch.cat([seed_micro_batch(*place, 9, torch.device("cpu")) for place in places])
    assert len(seeds.unique()) == len(seeds) == 2 * 10 * 4 * 4 * 9
    assert seeds.dtype == torch.int64 and seeds.min() >= 0 and seeds.max() > 2**62, "all bits but the sign are in use"


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [[], ["model.kv_heads=1", "model.positions=rotary"], ["train.precision=fp32"]], ids=str)
def test_half_the_steps_and_the_other_half_give_the_bits_of_all_on_a_gpu(tmp_path, changes):
    # wide enough for flash attention's backward to have several blocks of keys, which add to the same gradient of queries
    sizes = ["model.width=256", "model.heads=4", "model.context=512", "train.batch_size=16", "model.dropout=0.1"]
    steps = ["device=cuda", "deterministic=true", *sizes, *changes, "optim.schedule=constant", "train.steps=20"]
    # not forked: CUDA can't be used in a fork of a process that has seen it
    for arguments in (["folder=whole"], ["folder=cut", "train.steps=10"], ["folder=cut", "resume=auto"]):
        command = [sys.executable, str(ROOT / "train.py"), *corpus(tmp_path), *steps, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")
