"""One training step: micro-batches, loss scales, clipping, learning rates, which parameters decay; and the same as a graph."""

import math
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

import configs
from configs.machine import Machine
from configs.schema import OptimConfig, Schedule
from data import Batches, Split
from model import GPT
from tests.runs import ROOT, bits, composed, corpus
from training import step as steps
from training.build import compile_model
from training.checkpoint import TrainState
from training.evaluation import Evaluation
from training.inputs import Inputs
from training.optimizer import adamw, make_optimizer, parameter_groups
from training.precision import MixedPrecision
from training.schedule import learning_rate
from training.step import WARM_UP, TrainingStep

TOKENS = np.random.default_rng(1).integers(20, size=8000).astype(np.uint16)
CPU = MixedPrecision(torch.device("cpu"), torch.float32)


def gpt(overrides):
    cfg = composed(overrides)
    torch.manual_seed(0)
    return cfg, GPT(cfg.model, cfg.norm, vocab_size=20)


def step_of(cfg, model, precision=CPU, **options):
    """A step of the model on random tokens, with what the optimizer is given in `seen`."""
    model.to(precision.device)
    scaler = options.pop("scaler", None) or precision.scaler()
    state = TrainState(model, make_optimizer(model, cfg.optim), scaler, tokenizer="")
    batches = Batches(TOKENS, context=cfg.model.context, batch_size=cfg.train.batch_size, seed=cfg.seed)
    inputs = Inputs(batches, cfg, model.dropout_sites, precision.device)
    forward = compile_model(model) if cfg.train.compile and precision is not CPU else model
    return TrainingStep(forward, state, inputs, cfg, precision, **options)


def one_step(overrides, scaled=False):
    cfg, model = gpt(overrides)
    step, seen = step_of(cfg, model, scaler=torch.amp.GradScaler("cpu", enabled=scaled)), {}
    hook = step.state.optimizer.register_step_pre_hook
    hook(lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters()}))
    step(0)
    return step.loss, step.grad_norm, seen, model


@pytest.mark.parametrize("clip_norm", [0, 0.01])
def test_a_gradient_is_clipped_after_its_norm_is_measured_also_with_a_scaler_and_in_pieces(tiny, clip_norm):
    overrides = [*tiny, f"optim.clip_norm={clip_norm}"]
    loss, norm, grads, _ = one_step(overrides)
    left = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    assert norm > 0.1 and left == pytest.approx(clip_norm or norm.item(), rel=1e-3)
    for pieces, scaled, atol in ((1, True, 1e-8), (2, False, 1e-6), (8, True, 1e-6)):
        other_loss, other_norm, other, _ = one_step([*overrides, f"train.accumulation={pieces}"], scaled)
        torch.testing.assert_close((other_loss, other_norm), (loss, norm))
        for name, grad in grads.items():
            torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=atol, msg=name)


def test_the_step_uses_the_rate_of_the_schedule(tiny):
    moved = one_step([*tiny, "optim.lr=1e-3", "optim.min_lr=0"])[3]
    _, start = gpt(tiny)
    distance = (moved.blocks[0].mlp.down.weight - start.blocks[0].mlp.down.weight).abs().max().item()
    assert distance == pytest.approx(1e-3 / 3, rel=0.05), "Adam's first step is the rate; warm-up starts at a third of it"


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_whose_scaled_gradient_overflows_changes_nothing_but_the_scale(tiny, kind):
    cfg, model = gpt([*tiny, f"optim.kind={kind}"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10**9)  # the first steps overflow
    step, kept = step_of(cfg, model, scaler=scaler), [p.detach().clone() for p in model.parameters()]
    step(0)
    assert not step.grad_norm.isfinite() and scaler.get_scale() == 2.0**126
    assert all(map(torch.equal, model.parameters(), kept))
    for number in range(1, 40):
        step(number)
    assert step.grad_norm.isfinite() and not torch.equal(next(model.parameters()), kept[0])
    assert all(value.isfinite().all() for of in step.state.optimizer.state.values() for value in of.values())


# ---- as a CUDA graph ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch):
    """Stands for a GPU: what is captured is called anew by each replay. captures.error is raised by a capture."""
    found = []

    def captured(act, pool):
        found.append(act)
        if captures.error:
            try:
                raise captures.error
            finally:  # as torch.cuda.graph ends
                raise RuntimeError("capture was invalidated")
        return act

    @contextmanager
    def waits():
        yield captures.waits

    def captures():
        return found

    captures.error, captures.waits = None, []
    for name, stand_in in (("captured", captured), ("aside", nullcontext), ("waits", waits)):
        monkeypatch.setattr(steps, name, stand_in)
    monkeypatch.setattr("training.evaluation.captured", captured)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return captures


def trained(tiny, number, **options):
    """The step after so many, the losses, and those of an evaluation."""
    cfg, model = gpt([*tiny, "model.dropout=0.1", "train.accumulation=2"])
    val = Evaluation(model, Split(TOKENS, 8000, 1), CPU, context=32, batch_size=8, batches=3)
    step, losses = step_of(cfg, model, evaluation=val, **options), []
    for each in range(number):
        step(each)
        losses.append(step.loss.item())
    return step, losses, val().loss


def test_the_first_steps_of_a_run_warm_up_and_nothing_is_trained_twice(tiny, captures):
    for number, graphs in ((WARM_UP, 0), (WARM_UP + 1, 2), (10, 4)):
        step, losses, val = trained(tiny, number, graph=True)
        assert (losses, val) == trained(tiny, number)[1:] and len(captures()) == graphs, "of the step and of evaluation"
        assert step.state.model.training and all(p.grad is None for p in step.parameters)


def test_what_can_not_be_captured_says_why_and_goes_on_but_a_lack_of_memory_is_raised(tiny, captures, monkeypatch):
    expected, said = trained(tiny, 6)[1:], []
    captures.waits = ["model.py:7"]
    assert trained(tiny, 6, graph=True, say=said.append)[1:] == expected and not captures()
    captures.waits, captures.error = [], RuntimeError("operation not permitted when stream is capturing")
    assert trained(tiny, 6, graph=True, say=said.append)[1:] == expected
    assert [why.partition(". It goes on without")[0] for why in said] == [
        "No CUDA graph of the step: it waits for the device in model.py:7",
        "No CUDA graph of the step: RuntimeError: operation not permitted when stream is capturing",
    ]
    monkeypatch.setattr("training.evaluation.captured", steps.captured)  # of evaluation alone
    monkeypatch.setattr(steps, "captured", lambda act, pool: act)
    assert trained(tiny, 6, graph=True, say=said.append)[1:] == expected and len(said) == 3
    captures.error = torch.OutOfMemoryError("no memory")
    with pytest.raises(torch.OutOfMemoryError):
        trained(tiny, 6, graph=True)


ON_GPU = [
    ("train.accumulation=4", "bf16"),
    ("optim.kind=muon model.qk_norm=true model.positions=rotary model.kv_heads=1", "bf16"),
    ("norm.impl=torch norm.placement=sandwich loss.impl=torch", "bf16"),
    ("train.precision=fp16 optim.kind=muon train.accumulation=2", "fp16"),
    ("train.precision=fp32 model.block=parallel model.drop_path=0.1 train.recompute=true model.attention_dropout=0", "fp32"),
    ("train.compile=true norm.placement=post", "bf16"),
    ("train.compile=true optim.kind=muon train.accumulation=4 norm.impl=torch", "bf16"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("more", "precision"), ON_GPU)
def test_on_a_gpu_replays_give_the_bits_of_the_steps_without_a_graph(tiny, deterministic, more, precision):
    """With dropout, attention's too, whose masks PyTorch's generator draws."""
    given = [o for o in tiny if o != "device=cpu"] + ["model.dropout=0.2", "train.steps=100000", "device=cuda", *more.split()]
    on = MixedPrecision(torch.device("cuda"), {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision])
    found, said = [], []
    for graph in (True, False):
        torch.compiler.reset()
        cfg = configs.load(given, on=Machine("cuda"))
        torch.manual_seed(0)
        model = GPT(cfg.model, cfg.norm, vocab_size=20, loss=cfg.loss, mlp=cfg.mlp).cuda()
        val = Evaluation(model, Split(TOKENS, 8000, 1), on, context=32, batch_size=8)
        step, figures = step_of(cfg, model, on, graph=graph, evaluation=val, say=said.append), []
        for number in (*range(100), *range(90, 130)):  # back, as a run that is begun anew
            step(number)
            figures.append(torch.stack((step.loss, step.grad_norm)).nan_to_num())  # fp16 begins with overflows
        assert step.graph == graph
        found.append([torch.stack(figures), torch.tensor(val().loss), *(p.detach() for p in model.parameters())])
    assert not said and found[0][0][-10:, 0].mean() < found[0][0][:10, 0].mean()
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_a_failed_capture_leaves_a_run_that_goes_on_with_the_same_bits(tiny, deterministic):
    found, said = [], []
    for fails in (True, False):
        cfg = configs.load([*[o for o in tiny if o != "device=cpu"], "model.dropout=0.1", "device=cuda"], on=Machine("cuda"))
        torch.manual_seed(0)
        model = GPT(cfg.model, cfg.norm, vocab_size=20).cuda()
        on = MixedPrecision(torch.device("cuda"), torch.bfloat16)

        def wait(*_, fails=fails):
            if fails and torch.cuda.is_current_stream_capturing():
                torch.zeros((), device="cuda").item()

        step = step_of(cfg, model, on, graph=fails, record=wait, say=said.append)
        for number in range(20):
            step(number)
        found.append([p.detach() for p in model.parameters()])
    assert len(said) == 1 and "train.graph=false" in said[0]
    assert all(map(torch.equal, *found))


# ---- parameters, rates, bits -------------------------------------------------------------------------------------------------


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


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [[], ["model.kv_heads=1", "model.positions=rotary"], ["train.precision=fp32"]], ids=str)
def test_half_the_steps_and_the_other_half_give_the_bits_of_all_on_a_gpu(tmp_path, changes):
    # wide enough for flash attention's backward to have several blocks of keys, which add to the same gradient of queries
    sizes = ["model.width=256", "model.heads=4", "model.context=512", "train.batch_size=16", "model.dropout=0.1"]
    steps = ["device=cuda", "deterministic=true", *sizes, *changes, "optim.schedule=constant", "optim.min_lr=null"]
    steps += ["train.steps=20"]
    # not forked: CUDA can't be used in a fork of a process that has seen it
    graph, none = "train.graph=true", "train.graph=false"  # a checkpoint of one is taken up by the other
    for arguments in (["folder=whole", graph], ["folder=cut", none, "train.steps=10"], ["folder=cut", "resume=auto", graph]):
        command = [sys.executable, str(ROOT / "train.py"), *corpus(tmp_path), *steps, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")
