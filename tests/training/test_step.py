"""One training step: what micro-batches, loss scales, clipping and schedule do to it."""

import pytest
import torch

import configs
import training.step as step_module
from configs.machine import Machine
from configs.schema import COMPILE_MODES, TrainConfig
from model import GPT
from tests.runs import composed
from training.checkpoint import TrainState
from training.precision import Precision
from training.step import adamw, compile_model, prepare, training_step


def one_step(overrides, batch, scaled=False):
    cfg = composed(overrides)
    torch.manual_seed(0)
    model = GPT(cfg.model, cfg.norm, vocab_size=20)
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", enabled=scaled), tokenizer="")
    seen = {}
    state.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    )
    loss, grad_norm = training_step(model, state, batch, 0, cfg, Precision(torch.device("cpu"), torch.float32))
    return loss, grad_norm, seen, model


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(20, (8, 32), generator=generator) for _ in range(2))


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(tiny, batch, pieces):
    loss, norm, grads, _ = one_step([*tiny, "optim.clip_norm=0"], batch)
    loss_in_pieces, norm_in_pieces, grads_in_pieces, _ = one_step(
        [*tiny, "optim.clip_norm=0", f"train.accumulation={pieces}"], batch
    )

    torch.testing.assert_close(loss_in_pieces, loss)
    torch.testing.assert_close(norm_in_pieces, norm)
    for name, grad in grads.items():
        torch.testing.assert_close(grads_in_pieces[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_micro_batches_have_masks_of_their_own(tiny, batch, monkeypatch):
    seen = []
    original = step_module.seed_micro_batch
    monkeypatch.setattr(step_module, "seed_micro_batch", lambda *a, **k: seen.append(original(*a, **k)) or seen[-1])

    one_step([*tiny, "model.dropout=0.1", "train.accumulation=4"], batch)

    assert len(torch.stack(seen).unique()) == 4 * len(seen[0])


@pytest.mark.parametrize("clip_norm", [0, 0.01])
def test_a_gradient_scaler_changes_neither_the_norm_nor_what_is_clipped(tiny, batch, clip_norm):
    _, norm, grads, _ = one_step([*tiny, f"optim.clip_norm={clip_norm}"], batch)
    _, scaled_norm, scaled_grads, _ = one_step([*tiny, f"optim.clip_norm={clip_norm}"], batch, scaled=True)

    torch.testing.assert_close(scaled_norm, norm)
    for name, grad in grads.items():
        torch.testing.assert_close(scaled_grads[name], grad, rtol=1e-4, atol=1e-8, msg=name)


def test_the_gradient_is_clipped_and_its_norm_reported_from_before(tiny, batch):
    _, norm, grads, _ = one_step([*tiny, "optim.clip_norm=0.01"], batch)
    clipped = torch.stack([grad.norm() for grad in grads.values()]).norm()

    assert norm > 0.1
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_no_clipping_leaves_the_gradient_alone(tiny, batch):
    _, norm, grads, _ = one_step([*tiny, "optim.clip_norm=0"], batch)

    torch.testing.assert_close(torch.stack([grad.norm() for grad in grads.values()]).norm(), norm)


def test_the_step_uses_the_rate_of_the_schedule(tiny, batch):
    slow = one_step([*tiny, "optim.lr=1e-6", "optim.min_lr=0"], batch)[3]
    fast = one_step([*tiny, "optim.lr=1e-2", "optim.min_lr=0"], batch)[3]
    torch.manual_seed(0)
    cfg = composed(tiny)
    start = GPT(cfg.model, cfg.norm, vocab_size=20)

    moved = [(model.blocks[0].mlp.down.weight - start.blocks[0].mlp.down.weight).abs().max().item() for model in (slow, fast)]
    # Adam's first step is the rate itself; warm-up starts at a third of it
    assert moved == pytest.approx([1e-6 / 3, 1e-2 / 3], rel=0.05)


@pytest.mark.parametrize(
    ("given", "machine", "expected"),
    [
        (None, Machine("cpu"), False),
        (None, Machine("cuda"), True),
        (None, Machine("cuda", triton=False), False),
        (None, Machine("cuda", cpp_compiler=False), False),
        (False, Machine("cuda"), False),
        (True, Machine("cpu"), True),
    ],
)
def test_the_loss_is_compiled_where_it_is_asked_for_or_left_open_on_a_gpu(tiny, given, machine, expected):
    cfg = composed(tiny)
    model = GPT(cfg.model, cfg.norm, vocab_size=20)
    prepare(model, TrainConfig(compile_loss=given, recompute=True), machine)
    assert model.compile_loss is expected and model.recompute


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_cuda_graphs_give_the_losses_of_the_compiled_model(tiny, impl):
    # shared masks, since a graph draws torch's own elsewhere in the generator's stream
    given = [o for o in tiny if o != "device=cpu"] + ["model.dropout=0.1", "model.attention_dropout=0", f"norm.impl={impl}"]
    precision, found = Precision(torch.device("cuda"), torch.bfloat16), []
    for mode in ("reduce-overhead", "default"):
        torch.compiler.reset()
        on_gpu = ["device=cuda", "norm.dropout_masks=shared", "train.compile=true", f"train.compile_mode={mode}"]
        cfg = configs.load([*given, *on_gpu], on=Machine("cuda"))
        torch.manual_seed(0)
        model = GPT(cfg.model, cfg.norm, vocab_size=20).cuda()
        state = TrainState(model, adamw(model, cfg.optim), precision.scaler(), tokenizer="")
        forward = compile_model(model, cfg.train)
        draw = torch.Generator().manual_seed(1)
        batches = [tuple(torch.randint(20, (8, 32), generator=draw) for _ in range(2)) for _ in range(8)]
        steps = [training_step(forward, state, batch, step, cfg, precision) for step, batch in enumerate(batches)]
        found.append(torch.stack([torch.stack(pair) for pair in steps]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", COMPILE_MODES)
def test_the_mode_is_asked_of_torch_compile(monkeypatch, mode):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options))
    compile_model(None, TrainConfig(compile=True, compile_mode=mode))
    found = asked[0].pop("options")
    assert asked == [{"fullgraph": True}]
    assert ("triton.cudagraphs" in found) == (mode in ("reduce-overhead", "max-autotune"))
    assert ("max_autotune" in found) == (mode in ("max-autotune", "max-autotune-no-cudagraphs"))
    assert found["online_softmax"] is False  # the loss inside


def test_both_implementations_start_from_the_same_weights(tiny):
    weights = []
    for impl in ("fused", "torch"):
        cfg = composed([*tiny, f"norm.impl={impl}"])
        torch.manual_seed(cfg.seed)
        weights.append(GPT(cfg.model, cfg.norm, vocab_size=20).state_dict())

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
