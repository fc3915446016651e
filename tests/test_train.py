"""The loop, in this process: what it learns, logs and says, and what it repeats exactly."""

import math

import pytest
import torch
import yaml

import configs
import train
from configs.machine import Machine
from model.loss import TWO_PASSES
from tests.runs import CPU, losses, read_json, train_here
from training import checkpoint
from training.clock import Window


def test_a_run_learns_and_logs_what_the_design_names(tiny, tmp_path):
    summary, metrics = train_here(tiny, tmp_path / "run", plot=True)
    always = ("step", "train/loss", "train/grad_norm", "train/lr", "perf/step_ms", "perf/tokens_per_s")
    for every, names in ((5, always), (10, ("step", "val/loss", "val/bits_per_byte"))):
        lines = [line for line in metrics if names[1] in line]
        assert [line["step"] for line in lines] == list(range(every, 31, every))
        assert all(line.keys() == set(names) for line in lines)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"] < math.log(64)  # 64: the vocabulary, padded
    # one byte a character
    assert summary.final.bits_per_byte == pytest.approx(summary.final.loss / math.log(2))
    assert summary.sample.startswith("the") and len(summary.sample) == 13
    facts = read_json(summary.folder / "environment.json")
    assert facts["versions"]["torch"] in torch.__version__ and facts["gpu"] is None
    assert {"command", "git", "python", "cuda", "threads"} <= facts.keys()
    assert configs.from_dict(yaml.safe_load((summary.folder / "config.yaml").read_text())).train.steps == 30
    kept = {path.suffix for path in (summary.folder / "last").iterdir()}
    assert kept == {".safetensors", ".json", ""}, "no file that can hold code; the sums have no suffix"
    assert {path.name for path in summary.folder.iterdir()} == {
        *("config.yaml", "environment.json", "metrics.jsonl", "summary.json"),
        *("tokenizer.json", "sample.txt", "checkpoints", "last", "best", "loss.png", "run.json", ".lock"),
    }


def test_tokens_per_second_counts_slow_steps_and_the_step_time_is_the_typical_one(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train.StepClock, "window", lambda _: Window(median_ms=10.0, mean_ms=40.0))
    _, metrics = train_here([*tiny, "train.steps=5"], tmp_path / "run")
    assert losses(metrics, "perf/step_ms") == [10.0]
    assert losses(metrics, "perf/tokens_per_s") == pytest.approx([8 * 32 / 0.040])


def test_logging_evaluation_and_what_else_is_drawn_do_not_shift_the_run(tiny, tmp_path):
    overrides = [*tiny, "model.dropout=0.1"]
    one, _ = train_here(overrides, tmp_path / "run")
    torch.rand(7)
    other, _ = train_here([*overrides, "eval.every=3", "logging.every=7", "checkpoint.every=4"], tmp_path / "run")
    assert one.final == other.final


@pytest.mark.parametrize(("kind", "dropout"), [("layernorm", 0.1), ("rmsnorm", 0.0)])
def test_fused_and_torch_norms_train_alike_with_shared_masks(tiny, tmp_path, dropout, kind):
    overrides = [*tiny, f"model.dropout={dropout}", f"norm.kind={kind}", "norm.dropout_masks=shared", "logging.every=1"]
    _, fused = train_here([*overrides, "norm.impl=fused"], tmp_path / "fused")
    _, plain = train_here([*overrides, "norm.impl=torch"], tmp_path / "torch")
    assert losses(fused) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(fused, "val/loss") == pytest.approx(losses(plain, "val/loss"), rel=1e-5)


def test_the_compiled_model_learns_the_same(tiny, tmp_path, monkeypatch):
    asked = []

    def without_a_compiler(model, **options):
        """As torch.compile, traced whole but run without generated code: this machine may have no C++ compiler."""
        asked.append(options)
        return original(model, backend="eager", fullgraph=options["fullgraph"])

    original = torch.compile
    monkeypatch.setattr(torch, "compile", without_a_compiler)
    monkeypatch.setattr(torch.compiler, "reset", lambda: asked.append("reset"))
    overrides = [*tiny, "train.steps=6", "model.layers=1", "model.dropout=0.1", "model.attention_dropout=0", "logging.every=1"]
    _, eager = train_here(overrides, tmp_path / "eager")
    compiled, metrics = train_here([*overrides, "train.compile=true"], tmp_path / "compiled")
    assert asked == ["reset", {"fullgraph": True, "options": TWO_PASSES}]
    assert losses(metrics) == pytest.approx(losses(eager), rel=1e-5)
    # the checkpoint has the names of the model, not of its compiled wrapper
    assert all("_orig_mod" not in name for name in checkpoint.read(compiled.folder).model())


@pytest.mark.parametrize(
    ("overrides", "on", "said"),
    [
        (["model.layers=1"], CPU, "parameters, 1 layer × 32\n"),
        ([], CPU, "PyTorch reference: no kernel runs on this CPU"),
        (["norm.impl=torch"], CPU, "PyTorch's own operators"),
        (["train.precision=bf16"], Machine("cpu", bf16=False), "bf16, emulated: this CPU has no bf16 arithmetic"),
    ],
)
def test_the_table_of_facts_counts_and_warns(tiny, tmp_path, capsys, overrides, on, said):
    summary, _ = train_here([*tiny, "train.steps=3", *overrides], tmp_path / "run", on=on)
    shown = capsys.readouterr().out
    facts = ("device", "precision", "parameters", "vocabulary", "held out", "epochs", "W&B", "run folder", said)
    assert [fact for fact in facts if fact not in shown] == []
    assert all(weight.dtype is torch.float32 for weight in checkpoint.read(summary.folder).model().values())
