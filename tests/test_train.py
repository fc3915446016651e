"""The loop, in this process: what it logs, what it repeats exactly, and how it stops."""

import math
from contextlib import contextmanager

import pytest
import torch

import configs
import train
import training.step as step_module
from configs import ConfigError
from configs.machine import Machine
from model import GPT
from tests.runs import FakeWandb, train_here
from training import checkpoint
from training.checkpoint import TrainState
from training.clock import StepClock, Window
from training.evaluation import Validation
from training.health import NonFiniteError
from training.optimizer import adamw
from training.precision import Precision
from training.resume import Start
from training.run import open_run
from training.saver import Saver
from training.step import training_step

CPU = Machine("cpu")


def losses(metrics, name="train/loss"):
    return [line[name] for line in metrics if name in line]


def test_a_run_learns_and_logs_what_the_design_names(tiny, tmp_path):
    summary, metrics = train_here(tiny, tmp_path / "run", plot=True)

    train_lines = [line for line in metrics if "train/loss" in line]
    assert [line["step"] for line in train_lines] == [5, 10, 15, 20, 25, 30]
    always = {"step", "train/loss", "train/grad_norm", "train/lr", "perf/step_ms", "perf/tokens_per_s"}
    assert all(line.keys() == always for line in train_lines)
    val_lines = [line for line in metrics if "val/loss" in line]
    assert [line["step"] for line in val_lines] == [10, 20, 30]
    assert all(line.keys() == {"step", "val/loss", "val/bits_per_byte"} for line in val_lines)
    assert val_lines[-1]["val/loss"] < val_lines[0]["val/loss"] < math.log(64)  # 64: the vocabulary, padded
    # one byte a character
    assert summary.final.bits_per_byte == pytest.approx(summary.final.loss / math.log(2))
    assert summary.sample.startswith("the") and len(summary.sample) == 13
    files = {path.name for path in summary.folder.iterdir()}
    assert files == {
        *("config.yaml", "environment.json", "metrics.jsonl", "summary.json"),
        *("tokenizer.json", "sample.txt", "checkpoints", "last", "best", "loss.png", "run.json", ".lock"),
    }


def test_tokens_per_second_counts_slow_steps_and_the_step_time_is_the_typical_one(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train.StepClock, "window", lambda _: Window(median_ms=10.0, mean_ms=40.0))
    _, metrics = train_here([*tiny, "train.steps=5"], tmp_path / "run")

    assert losses(metrics, "perf/step_ms") == [10.0]
    assert losses(metrics, "perf/tokens_per_s") == pytest.approx([8 * 32 / 0.040])


@pytest.mark.parametrize("masks", ["native", "shared"])
def test_the_same_seed_gives_the_same_run(tiny, tmp_path, masks):
    overrides = [*tiny, "model.dropout=0.1", f"norm.dropout_masks={masks}", "norm.impl=torch"]
    _, first = train_here(overrides, tmp_path / "run")
    torch.rand(7)  # where torch's generator stands does not matter
    _, second = train_here(overrides, tmp_path / "run")
    _, other = train_here([*overrides, "seed=2"], tmp_path / "run")

    assert losses(first) == losses(second)
    assert losses(first, "val/loss") == losses(second, "val/loss")
    assert losses(first) != losses(other)


def test_logging_and_evaluation_do_not_shift_the_run(tiny, tmp_path):
    overrides = [*tiny, "model.dropout=0.1"]
    one, _ = train_here(overrides, tmp_path / "run")
    other, _ = train_here([*overrides, "eval.every=3", "logging.every=7", "checkpoint.every=4"], tmp_path / "run")

    assert one.final == other.final


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_fused_and_torch_norms_train_alike_with_shared_masks(tiny, tmp_path, dropout, kind):
    overrides = [*tiny, f"model.dropout={dropout}", f"norm.kind={kind}", "norm.dropout_masks=shared", "logging.every=1"]
    _, fused = train_here([*overrides, "norm.impl=fused"], tmp_path / "fused")
    _, plain = train_here([*overrides, "norm.impl=torch"], tmp_path / "torch")

    assert losses(fused) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(fused, "val/loss") == pytest.approx(losses(plain, "val/loss"), rel=1e-5)


# ---- from the config to what uses it ---------------------------------------------------------------------------------------


def test_the_logging_group_reaches_wandb(tiny, tmp_path, monkeypatch):
    fake = FakeWandb(monkeypatch)
    overrides = ["logging.wandb=offline", "logging.project=p", "logging.group=g", "logging.name=n", "logging.tags=[a,b]"]
    train_here([*tiny, "train.steps=5", *overrides], tmp_path / "run")

    assert {name: fake.arguments[name] for name in ("project", "group", "name", "tags", "mode")} == {
        "project": "p",
        "group": "g",
        "name": "n",
        "tags": ["a", "b"],
        "mode": "offline",
    }
    assert fake.arguments["config"]["optim"]["lr"] == 3e-3
    assert "parameters" in fake.arguments["config"]["facts"]["model"]


def test_metrics_summary_and_picture_reach_wandb(tiny, tmp_path, monkeypatch):
    fake = FakeWandb(monkeypatch)
    summary, metrics = train_here([*tiny, "train.steps=10", "logging.wandb=offline"], tmp_path / "run", plot=True)

    *values, picture = fake.logged
    assert [{"step": step} | line for step, line in values] == metrics
    assert picture == (10, {"loss": f"image {summary.folder / 'loss.png'}"})
    assert fake.summary["final"] == {"loss": summary.final.loss, "bits_per_byte": summary.final.bits_per_byte}
    assert fake.summary["best"]["loss"] == summary.best.loss
    assert fake.summary["sample"] == summary.sample
    assert fake.exit_code == 0


def test_eval_batches_is_what_evaluation_reads(tiny, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "evaluate", lambda *_, **options: seen.append(options) or Validation(1.0, 1.0))
    train_here([*tiny, "train.steps=5", "eval.batches=3", "train.accumulation=2"], tmp_path / "run")

    assert seen == [{"context": 32, "batch_size": 4, "batches": 3, "world": train.ALONE}]


def test_the_sample_is_drawn_as_the_config_says(tiny, tmp_path, monkeypatch):
    seen = []
    original = GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda self, *a, **k: seen.append(a[1:]) or original(self, *a, **k))
    train_here([*tiny, "train.steps=5", "sample.temperature=0.25", "sample.top_k=3", "sample.tokens=4"], tmp_path / "run")

    assert seen == [(4, 0.25, 3)]


def spy_on_steps(monkeypatch, look):
    """Calls look(state) after each step, and with "before" before each."""
    original = train.training_step

    def step(forward, state, *rest):
        look("before", state)
        result = original(forward, state, *rest)
        look("after", state)
        return result

    monkeypatch.setattr(train, "training_step", step)


def test_the_seed_decides_the_initial_weights(tiny, tmp_path, monkeypatch):
    first = []
    spy_on_steps(
        monkeypatch,
        lambda when, state: when == "before" and first.append(state.model.blocks[0].mlp.down.weight.detach().clone()),
    )
    for seed in (1, 1, 2):
        train_here([*tiny, "train.steps=3", f"seed={seed}"], tmp_path / "run")

    assert torch.equal(first[0], first[3]) and not torch.equal(first[0], first[6])  # three steps a run


def test_the_training_loss_is_the_mean_of_the_steps_since_the_last_line(tiny, tmp_path):
    _, each = train_here([*tiny, "train.steps=13", "logging.every=1"], tmp_path / "each")
    _, some = train_here([*tiny, "train.steps=13", "logging.every=5"], tmp_path / "some")

    one = losses(each)
    assert losses(some) == pytest.approx([sum(part) / len(part) for part in (one[:5], one[5:10], one[10:])])


def test_the_rate_is_that_of_the_step_it_is_logged_for(tiny, tmp_path, monkeypatch):
    used = []
    spy_on_steps(monkeypatch, lambda when, state: when == "after" and used.append(state.optimizer.param_groups[0]["lr"]))
    _, metrics = train_here([*tiny, "train.steps=8", "logging.every=1"], tmp_path / "run")

    assert losses(metrics, "train/lr") == used and len(set(used)) == 8


def test_evaluation_and_checkpoints_stand_in_a_pause(tiny, tmp_path, monkeypatch):
    paused, during = [], []

    class Watched(StepClock):
        @contextmanager
        def paused(self):
            with super().paused():
                paused.append(True)
                yield
                paused.pop()

    evaluate, save = train.evaluate, Saver.save
    monkeypatch.setattr(train, "StepClock", Watched)
    monkeypatch.setattr(train, "evaluate", lambda *a, **k: (during.append(("evaluate", len(paused))), evaluate(*a, **k))[1])
    monkeypatch.setattr(Saver, "save", lambda *a: (during.append(("save", len(paused))), save(*a))[1])
    train_here([*tiny, "train.steps=6", "checkpoint.every=4", "eval.every=0"], tmp_path / "run")

    assert during == [("save", 1), ("evaluate", 1), ("save", 1)]


def test_a_run_that_compiles_forgets_what_earlier_ones_compiled(tiny, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda model, **_: calls.append("compile") or model)
    overrides = [*tiny, "train.steps=3", "model.attention_dropout=0"]
    train_here([*overrides, "train.compile=true"], tmp_path / "compiled")
    train_here(overrides, tmp_path / "eager")

    assert calls == ["reset", "compile"]


# ---- the step --------------------------------------------------------------------------------------------------------------


def one_step(overrides, batch, scaled=False):
    cfg = configs.load(overrides, on=CPU)
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
    cfg = configs.load(tiny, on=CPU)
    start = GPT(cfg.model, cfg.norm, vocab_size=20)

    moved = [(model.blocks[0].mlp.down.weight - start.blocks[0].mlp.down.weight).abs().max().item() for model in (slow, fast)]
    # Adam's first step is the rate itself; warm-up starts at a third of it
    assert moved == pytest.approx([1e-6 / 3, 1e-2 / 3], rel=0.05)


def test_both_implementations_start_from_the_same_weights(tiny):
    weights = []
    for impl in ("fused", "torch"):
        cfg = configs.load([*tiny, f"norm.impl={impl}"], on=CPU)
        torch.manual_seed(cfg.seed)
        weights.append(GPT(cfg.model, cfg.norm, vocab_size=20).state_dict())

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---- stopping --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tiny, tmp_path, impl):
    with pytest.raises(NonFiniteError) as error:
        train_here(
            [*tiny, f"norm.impl={impl}", "optim.lr=1e38", "optim.min_lr=0", "optim.warmup_steps=0", "logging.every=30"],
            tmp_path / "run",
        )

    message = str(error.value)
    assert 1 <= error.value.step <= 4
    assert message.count(f"at step {error.value.step}") == message.count("at step") == 1
    assert "Batch: epoch 0, window" in message
    assert "Last good checkpoint: none" in message
    assert not (tmp_path / "run" / "checkpoints").exists()


def goes_bad_at(step, monkeypatch):
    """From `step` on, counted from 1, a weight is NaN."""
    original = train.training_step

    def goes_bad(forward, state, batch, index, *rest):
        if index == step - 1:
            next(iter(state.model.parameters())).data[0, 0] = float("nan")
        return original(forward, state, batch, index, *rest)

    monkeypatch.setattr(train, "training_step", goes_bad)


def test_the_last_good_checkpoint_is_the_one_with_the_most_steps(tiny, tmp_path, monkeypatch):
    goes_bad_at(9, monkeypatch)

    with pytest.raises(NonFiniteError, match=r"Last good checkpoint: .*step_00000008"):  # the best so far
        train_here([*tiny, "checkpoint.every=5", "eval.every=8", "logging.every=30"], tmp_path / "run")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_validation_loss_that_is_no_number_stops_the_run_and_is_never_the_best(tiny, tmp_path, monkeypatch, bad):
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: Validation(bad, bad))

    with pytest.raises(NonFiniteError, match="the validation loss is NaN or infinite at step 10"):
        train_here(tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "best").exists()
    assert "val/" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_gradient_that_is_never_finite_stops_an_fp16_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Precision, "scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=4.0))
    scale = torch.amp.GradScaler.scale
    monkeypatch.setattr(torch.amp.GradScaler, "scale", lambda self, loss: scale(self, loss) * float("nan"))

    with pytest.raises(NonFiniteError, match="every loss scale"):
        train_here([*tiny, "logging.every=1"], tmp_path / "run")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "train/loss" in text and "NaN" not in text and "train/grad_norm" not in text


def test_a_bad_run_names_and_keeps_its_last_good_checkpoint(tiny, tmp_path, monkeypatch):
    goes_bad_at(14, monkeypatch)
    with pytest.raises(NonFiniteError, match=r"at step 14\.(.|\n)*Last good checkpoint: .*step_00000012"):
        train_here([*tiny, "checkpoint.every=4", "logging.every=30", "eval.every=30"], tmp_path / "run")

    stored = checkpoint.read(tmp_path / "run")
    assert stored.step == 12
    assert all(torch.isfinite(weight).all() for weight in stored.model().values())


def test_what_the_data_refuses_is_a_config_error_and_leaves_no_checkpoint(tiny, tmp_path):
    with pytest.raises(ConfigError, match="context"):
        train_here([*tiny, "model.context=100000"], tmp_path / "run")


def test_the_compiled_model_learns_the_same(tiny, tmp_path, monkeypatch):
    asked = []

    def without_a_compiler(model, **options):
        """As torch.compile, traced whole but run without generated code: this machine may have no C++ compiler."""
        asked.append(options)
        return original(model, backend="aot_eager", **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", without_a_compiler)
    overrides = [*tiny, "train.steps=6", "model.layers=1", "model.dropout=0.1", "model.attention_dropout=0", "logging.every=1"]
    _, eager = train_here(overrides, tmp_path / "eager")
    compiled, metrics = train_here([*overrides, "train.compile=true"], tmp_path / "compiled")

    assert asked == [{"fullgraph": True}]
    assert losses(metrics) == pytest.approx(losses(eager), rel=1e-5)
    # the checkpoint has the names of the model, not of its compiled wrapper
    assert all("_orig_mod" not in name for name in checkpoint.read(compiled.folder).model())


def test_a_run_says_what_runs_its_norms(tiny, tmp_path, capsys):
    train_here([*tiny, "train.steps=3", "norm.impl=fused"], tmp_path / "run")
    fused = capsys.readouterr().out
    train_here([*tiny, "train.steps=3", "norm.impl=torch"], tmp_path / "run")
    plain = capsys.readouterr().out

    assert "PyTorch reference: no kernel runs on this CPU" in fused
    assert "PyTorch's own operators" in plain
    for fact in ("device", "precision", "parameters", "vocabulary", "held out", "epochs", "W&B", "run folder"):
        assert fact in fused


def test_bf16_autocast_trains_on_a_cpu(tiny, tmp_path):
    summary, metrics = train_here([*tiny, "train.precision=bf16", "train.steps=20"], tmp_path / "run")

    assert summary.final.loss < losses(metrics)[0]
    assert all(weight.dtype is torch.float32 for weight in checkpoint.read(summary.folder).model().values())


def test_open_run_closes_a_run_that_crashes(tiny, tmp_path):
    cfg = configs.load(tiny, on=CPU)
    with pytest.raises(RuntimeError), open_run(Start(cfg, tmp_path / "run"), torch.device("cpu")) as run:
        run.log(1, {"train/loss": 3.0})
        run.log(2, {"train/loss": 2.0})
        raise RuntimeError

    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
