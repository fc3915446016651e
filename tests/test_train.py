"""The loop, in this process: what it learns, logs and says, which keys reach what, and how a run ends that can't go on."""

import math
from contextlib import nullcontext

import pytest
import torch
import yaml

import configs
from tests.resume.stops import in_step, spoil
from tests.runs import FakeWandb, corpus, losses, newest, read_json, train_here
from training import checkpoint, plot, storage
from training.checkpoint import Validation
from training.evaluation import Evaluation
from training.metrics import Health, NonFiniteError
from training.precision import MixedPrecision

GOOD, NAN, INF = torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(float("inf"))


def test_a_run_learns_and_logs_what_the_design_names(tiny, tmp_path, capsys):
    summary, metrics = train_here([*tiny, "sample.temperature=0", "sample.prompt=the"], tmp_path / "run", plot=True)
    facts = ("2 layers × 32\n", "fused layernorm, pre, weight ones: PyTorch reference\n", "held out", "W&B")
    shown = capsys.readouterr().out
    assert [fact for fact in facts if fact not in shown] == []
    train_only = ("train/grad_norm", "train/lr", "perf/step_ms", "perf/tokens_per_s")
    for every, part, names in ((5, "train", train_only), (10, "val", ())):
        lines = [line for line in metrics if f"{part}/loss" in line]
        assert [line["step"] for line in lines] == list(range(every, 31, every))
        assert all(line.keys() == {"step", "tokens", f"{part}/loss", f"{part}/bits_per_byte", *names} for line in lines)
        assert all(line["tokens"] == 8 * 32 * line["step"] for line in lines)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"] < math.log(64)  # 64: the vocabulary, padded
    # one byte a character
    assert summary.final.bits_per_byte == pytest.approx(summary.final.loss / math.log(2))
    assert summary.sample.startswith("the") and len(summary.sample) == 13
    facts = read_json(summary.folder / "environment.json")
    assert facts["versions"]["torch"] in torch.__version__ and {"command", "git", "python", "gpu", "threads"} <= facts.keys()
    assert configs.from_dict(yaml.safe_load((summary.folder / "config.yaml").read_text())).train.steps == 30
    kept = {path.suffix for path in newest(summary.folder).iterdir()}
    assert kept == {".safetensors", ".json", ""}, "no file that can hold code; the sums have no suffix"
    files = "config.yaml environment.json metrics.jsonl summary.json tokenizer.json sample.txt loss.png run.json .lock .program"
    assert {path.name for path in summary.folder.iterdir()} == {*files.split(), "checkpoints"}


def test_bits_per_byte_of_each_split_are_by_its_own_text_and_everything_shows_the_same_figures(tmp_path, monkeypatch, capsys):
    """Words to train on and numbers held out, with a tokenizer of the words: a token has other numbers of bytes in each."""
    texts = {"a": "the king and the queen of the night " * 300, "b": "3141592653589793 " * 40}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    files = f"data.files=[{tmp_path}/a.txt,{tmp_path}/b.txt]"
    told = FakeWandb(monkeypatch)
    own = [files, "tokenizer=bpe", "tokenizer.vocab_size=300", "logging.wandb=offline"]
    summary, metrics = train_here([*corpus(tmp_path), *own], tmp_path / "run", plot=True)
    sizes = read_json(summary.folder / "summary.json")
    nats = {part: math.log(2) * len(texts[of]) / sizes[f"{part}_tokens"] for part, of in (("train", "a"), ("val", "b"))}
    assert nats["train"] > 2 * nats["val"], "else this test could not fail"
    for part in nats:
        for line in metrics:
            if f"{part}/loss" in line:
                assert line[f"{part}/bits_per_byte"] == pytest.approx(line[f"{part}/loss"] / nats[part], rel=0.01)
    last = {key: value for line in metrics for key, value in line.items()}
    assert f"{last['train/bits_per_byte']:.3f} bits/byte" in (shown := capsys.readouterr().out)
    assert f"{last['val/bits_per_byte']:.4f} bits per byte" in shown
    for part in nats:
        *_, drawn = plot.points(storage.read_metrics(summary.folder), f"{part}/bits_per_byte", "tokens")
        assert drawn == (30 * 256, last[f"{part}/bits_per_byte"])
        assert any(values.get(f"{part}/bits_per_byte") == last[f"{part}/bits_per_byte"] for _, values in told.logged)
    assert told.step_metrics == {"train/*": "tokens", "val/*": "tokens"}
    for kept in (told.arguments["config"], told.summary, sizes):
        assert (kept["vocabulary"], kept["tokens_per_step"]) == (279, 256) and kept["parameters"] > 10_000


def test_logging_evaluation_and_what_else_is_drawn_do_not_shift_the_run_and_a_line_has_the_mean_of_its_steps(tiny, tmp_path):
    overrides = [*tiny, "model.dropout=0.1", "train.steps=13"]
    one, lines = train_here([*overrides, "logging.every=1"], tmp_path / "run")
    torch.rand(7)
    other, means = train_here([*overrides, "eval.every=3", "logging.every=5", "checkpoint.every=4"], tmp_path / "run")
    assert one.final == other.final
    each = losses(lines)
    assert losses(means) == pytest.approx([sum(part) / len(part) for part in (each[:5], each[5:10], each[10:])])


def test_settings_metrics_summary_and_picture_reach_wandb(tiny, tmp_path, monkeypatch, capsys):
    fake = FakeWandb(monkeypatch)
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setenv("WANDB_RUN_GROUP", "theirs")
    overrides = ["train.steps=10", "logging.wandb=offline", "logging.group=g", "logging.name=n", "logging.tags=[a,b]"]
    summary, metrics = train_here([*tiny, *overrides], tmp_path / "run", plot=True)
    settings = {"project": "p", "group": "g", "name": "n", "tags": ["a", "b", "fused", "layernorm"], "mode": "offline"}
    assert settings.items() <= fake.arguments.items()
    assert "offline (project p)\n" in capsys.readouterr().out
    assert "  project: p\n" in (summary.folder / "config.yaml").read_text(), "the run goes on there"
    assert fake.arguments["config"]["optim"]["lr"] == 3e-3
    assert "parameters" in fake.arguments["config"]["facts"]["model"]
    *values, picture = fake.logged
    assert [{"step": step} | line for step, line in values] == metrics
    assert picture == (10, {"loss": f"image {summary.folder / 'loss.png'}"})
    assert fake.summary["final"] == {"loss": summary.final.loss, "bits_per_byte": summary.final.bits_per_byte}
    assert fake.summary["best"]["loss"] == summary.best.loss and fake.summary["sample"] == summary.sample
    fake.finish.assert_called_once_with(exit_code=0)


def test_the_last_good_checkpoint_is_the_one_with_the_most_steps(tiny, tmp_path):
    stops = pytest.raises(NonFiniteError, match=r"at step 9\. A lower optim.lr")
    with in_step(9, spoil):
        with stops:  # the best so far is the last
            train_here([*tiny, "checkpoint.every=5", "eval.every=8", "logging.every=30"], tmp_path / "run")
        stored = checkpoint.read(tmp_path / "run")
        assert stored.step == 8 and all(torch.isfinite(weight).all() for weight in stored.model().values())
        with stops:  # of a run that began elsewhere
            train_here([f"resume={tmp_path / 'run'}", "seed=2", "resume_with_changes=true"], tmp_path / "other")


def test_a_validation_loss_that_is_no_number_stops_the_run_and_is_never_the_best(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(Evaluation, "__call__", lambda *_, **__: Validation(float("nan"), float("nan")))
    with pytest.raises(NonFiniteError, match="the validation loss is NaN or infinite at step 10"):
        train_here(tiny, tmp_path / "run")
    assert not storage.checkpoints(tmp_path / "run")


def test_a_gradient_that_is_never_finite_stops_an_fp16_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(MixedPrecision, "scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=4.0))
    scale = torch.amp.GradScaler.scale
    spoilt = lambda self, loss: scale(self, loss) * (float("nan") if loss.requires_grad else 1)  # noqa: E731
    monkeypatch.setattr(torch.amp.GradScaler, "scale", spoilt)
    with pytest.raises(NonFiniteError, match=r"every loss scale down to 0\.5 at step 3"):
        train_here([*tiny, "logging.every=1"], tmp_path / "run")
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "train/loss" in text and "NaN" not in text and "train/grad_norm" not in text


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [(NAN, GOOD), (GOOD, INF)])
def test_the_first_bad_step_is_named_however_late_one_looks_but_an_overflow_under_a_scaler_is_ordinary_work(bad, scaled):
    health = Health(torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=scaled))
    for step in range(1, 10):
        health.watch(step, *(bad if 4 <= step < 8 else (GOOD, GOOD)))
    with nullcontext() if scaled and bad[0] is GOOD else pytest.raises(NonFiniteError, match="at step 4"):
        health.check(9)
    model = torch.nn.Linear(3, 3)
    model.weight.data[1, 2] = INF  # a bad weight is found while the loss is still finite
    with pytest.raises(NonFiniteError, match="at step 4" if not scaled or bad[0] is NAN else "a weight is NaN or infinite"):
        health.check_weights(model, 9)
