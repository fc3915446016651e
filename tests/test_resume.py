"""A run that goes on is the run that never stopped: the same bits, one record of it, and no change that matters."""

import json
import os
import random
import shutil
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import configs
import train
import training.step as step_module
from configs import ConfigError
from configs.machine import Machine
from model import GPT
from tests.runs import FakeWandb, bits, corpus, read_json, train_here
from training import checkpoint, storage
from training.checkpoint import TrainState
from training.evaluation import Validation
from training.health import NonFiniteError
from training.plot import read_metrics
from training.precision import Precision
from training.resume import settle
from training.storage import StorageError

AUTO = ["resume=auto", "logging.every=1", "checkpoint.every=6"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they give at these sizes, most of all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Died(BaseException):
    """Stands for the end of a process, which writes nothing more."""


@contextmanager
def in_step(number, act):
    """Within the block `act` happens in the middle of step `number`, counted from 1, before it changes anything."""
    original = train.training_step

    def step(forward, state, batch, index, *rest):
        if index == number - 1:
            act()
        return original(forward, state, batch, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_step", step)
        yield


def die():
    raise Died


def train_until(step, overrides, folder):
    """A run that dies in this step."""
    with in_step(step, die), pytest.raises(Died):
        train_here(overrides, folder)


def stop_with(number, step, overrides, folder):
    """A run that a signal reaches in this step. Returns its exit code."""
    with in_step(step, lambda: signal.raise_signal(number)), pytest.raises(SystemExit) as stop:
        train_here(overrides, folder)
    return stop.value.code


# ---- the same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_n_and_n_steps_give_the_same_bits_as_2n(tiny, tmp_path, monkeypatch, impl):
    monkeypatch.setattr(Precision, "scaler", lambda _: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5))
    seen = {}  # of each step: its batch, its dropout seeds, and where torch's generator stands
    original = step_module.seed_micro_batch

    def watched(seed, step, *rest, **options):
        seeds = original(seed, step, *rest, **options)
        seen.setdefault(step, []).append((seeds.tolist(), torch.get_rng_state()))
        return seeds

    monkeypatch.setattr(step_module, "seed_micro_batch", watched)
    original_step = train.training_step
    batches = {}

    def recorded(forward, state, batch, step, *rest):
        batches.setdefault(step, []).append(batch[0])
        return original_step(forward, state, batch, step, *rest)

    monkeypatch.setattr(train, "training_step", recorded)
    overrides = [*tiny, *AUTO, f"norm.impl={impl}", "model.dropout=0.1", "train.steps=24"]
    overrides += ["train.accumulation=2", "logging.every=5"]  # so that a line of metrics spans the checkpoint
    summary, _ = train_here(overrides, tmp_path / "whole")
    whole, generators = bits(tmp_path / "whole"), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    train_until(16, overrides, tmp_path / "cut")  # after 15 steps, with a checkpoint of 12
    torch.rand(7)
    rest, _ = train_here(overrides, tmp_path / "cut")

    assert bits(tmp_path / "cut") == whole
    assert whole["state"]["scaler"]["scale"] > 4.0
    assert rest.final == summary.final and rest.best == summary.best
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    again = [step for step, times in batches.items() if len(times) == 3]
    assert again == [12, 13, 14]  # counted from 0: done before the run died, and again from the checkpoint on
    for step, times in batches.items():
        assert all(torch.equal(times[0], other) for other in times), f"another batch in step {step}"
    for step, times in seen.items():
        assert all(seeds == times[i % 2][0] for i, (seeds, _) in enumerate(times)), f"other dropout seeds in step {step}"
        assert all(torch.equal(state, times[i % 2][1]) for i, (_, state) in enumerate(times)), f"generator in step {step}"


def test_going_on_by_path_in_the_runs_own_folder_gives_the_same_bits_too(tiny, tmp_path):
    overrides = [*tiny, "model.dropout=0.1", "logging.every=1", "checkpoint.every=6"]
    train_here(overrides, tmp_path / "whole")
    train_until(16, overrides, tmp_path / "cut")

    train_here([f"resume={tmp_path / 'cut'}"], tmp_path / "cut")

    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_checkpoints_and_lines_of_metrics_changes_no_bit(tiny, tmp_path, number):
    overrides = [*tiny, *AUTO, "model.dropout=0.1", "logging.every=5"]
    train_here(overrides, tmp_path / "whole")

    for step in (3, 9, 17):
        assert stop_with(number, step, overrides, tmp_path / "cut") == 128 + number
        assert storage.step_of(storage.kept(tmp_path / "cut")[0]) == step
    train_here(overrides, tmp_path / "cut")

    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")


@pytest.mark.parametrize("at", [10, 30])
def test_sigterm_in_an_evaluation_cuts_it_short_and_it_is_made_up_for(tiny, tmp_path, monkeypatch, at):
    overrides = [*tiny, *AUTO, "model.dropout=0.1"]
    train_here(overrides, tmp_path / "whole")
    original, forward = train.evaluate, GPT.forward

    def signalled(model, *rest, **options):
        if len(calls) == at // 10 - 1:  # eval.every=10
            monkeypatch.setattr(GPT, "forward", lambda *a, **k: (signal.raise_signal(signal.SIGTERM), forward(*a, **k))[1])
        calls.append(model)
        return original(model, *rest, **options)

    calls = []
    monkeypatch.setattr(train, "evaluate", signalled)
    with pytest.raises(SystemExit) as stop:
        train_here(overrides, tmp_path / "cut")
    assert stop.value.code == 143
    with pytest.raises(SystemExit) as stop:  # and once more, in the evaluation that is made up for
        train_here(overrides, tmp_path / "cut")
    monkeypatch.setattr(train, "evaluate", original)
    monkeypatch.setattr(GPT, "forward", forward)

    assert stop.value.code == 143
    assert storage.step_of(storage.kept(tmp_path / "cut")[0]) == at
    assert not any(line["step"] == at and "val/loss" in line for line in read_metrics(tmp_path / "cut" / "metrics.jsonl"))
    train_here(overrides, tmp_path / "cut")
    assert compared(tmp_path / "cut", at) == compared(tmp_path / "whole", at)


def compared(folder, at):
    """`bits`; the checkpoint of a last step was made before its evaluation where that was cut short."""
    found = bits(folder)
    for key in ("owes_validation", "validation", "best", "best_step") * (at == 30):
        del found["state"][key]
    return found


def test_a_run_takes_up_one_of_the_other_operator(tiny, tmp_path):
    overrides = [*tiny, *AUTO, "model.dropout=0.1", "norm.dropout_masks=shared"]
    train_until(14, [*overrides, "norm.impl=fused"], tmp_path / "run")
    other, _ = train_here([*overrides, "norm.impl=torch"], tmp_path / "run")
    whole, _ = train_here([*overrides, "norm.impl=fused"], tmp_path / "whole")

    assert other.final.loss == pytest.approx(whole.final.loss, rel=1e-5)


# ---- one record of it ------------------------------------------------------------------------------------------------------


def test_the_metrics_of_a_run_that_goes_on_have_no_hole_and_no_repeat(tiny, tmp_path):
    train_until(16, [*tiny, *AUTO], tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "tra')  # torn
    train_here([*tiny, *AUTO], tmp_path / "run")

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 31))
    assert [line["step"] for line in lines if "val/loss" in line] == [10, 20, 30]


def test_a_run_that_goes_on_is_the_same_run_to_wandb(tiny, tmp_path, monkeypatch):
    fake = FakeWandb(monkeypatch)
    overrides = [*tiny, *AUTO, "logging.wandb=offline", "logging.group=g"]
    train_until(16, overrides, tmp_path / "run")
    first = fake.arguments
    train_here(overrides, tmp_path / "run")
    again = fake.arguments
    train_here(overrides, tmp_path / "other")

    assert first["id"] == again["id"] != fake.arguments["id"]
    assert (first["resume"], again["resume"], fake.arguments["resume"]) == (None, "allow", None)
    assert first["group"] == again["group"] == "g"


def test_a_run_in_another_folder_leaves_the_first_as_it_was(tiny, tmp_path, monkeypatch):
    values = iter([1.0, 3.0, 2.0])  # the first is of the run that is resumed, and better than what follows
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: Validation(loss := next(values), loss))
    train_here([*tiny, "train.steps=5", "eval.every=0"], tmp_path / "half")
    before = {path: path.read_bytes() for path in (tmp_path / "half").rglob("*") if path.is_file()}

    summary, metrics = train_here(
        [*tiny, "train.steps=15", "eval.every=10", f"resume={tmp_path / 'half'}", "resume_with_changes=true"], tmp_path / "rest"
    )

    assert {path: path.read_bytes() for path in (tmp_path / "half").rglob("*") if path.is_file()} == before
    assert [line["step"] for line in metrics if "val/loss" in line] == [10, 15]
    assert summary.best.loss == 2.0  # of this folder, whose best checkpoint is its own
    assert checkpoint.read(summary.folder / "best").step == 15
    assert read_json(tmp_path / "rest" / "run.json")["wandb_id"] != read_json(tmp_path / "half" / "run.json")["wandb_id"]


def test_the_newest_checkpoints_are_kept_and_the_best(tiny, tmp_path, monkeypatch):
    values = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: Validation(loss := next(values), loss))
    train_here([*tiny, "checkpoint.every=3", "checkpoint.keep=3"], tmp_path / "run")

    assert [storage.step_of(path) for path in storage.kept(tmp_path / "run")] == [30, 27, 24, 20]
    assert (tmp_path / "run" / "best").resolve().name == storage.name(20)
    assert (tmp_path / "run" / "last").resolve().name == storage.name(30)


# ---- damage and refusals ---------------------------------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["model.safetensors", "training.safetensors", "state.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", [flip, lambda path: os.truncate(path, path.stat().st_size - 1)], ids=["flipped", "truncated"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tiny, tmp_path, capsys, part, harm):
    overrides = [*tiny, *AUTO, "train.steps=20", "eval.every=0"]
    train_until(16, overrides, tmp_path / "run")
    harm(tmp_path / "run" / "last" / part)
    capsys.readouterr()
    train_here(overrides, tmp_path / "run")
    said = capsys.readouterr().out

    assert "step_00000012" in said and "damaged" in said and "the one before it is used" in said
    assert "resumed from 6" in said
    lines = [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert lines == list(range(1, 21))


def test_a_run_without_any_whole_checkpoint_is_refused_and_left_as_it_is(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    flip(tmp_path / "run" / "last" / "model.safetensors")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()

    for choice in ("auto", tmp_path / "run"):
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged(.|\n)*no checkpoint in .*run is whole"):
            train_here([*tiny, f"resume={choice}"], tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    wider = [*tiny, *AUTO, "model.width=64", "optim.beta2=0.9"]

    with pytest.raises(ConfigError) as error:
        train_here(wider, tmp_path / "run")
    assert "model.width=64: the checkpoint was made with model.width=32." in str(error.value)
    assert "optim.beta2=0.9: the checkpoint was made with optim.beta2=0.99." in str(error.value)
    with pytest.raises(ConfigError, match=r"step_00000006 do not fit this model: (.|\n)*size mismatch"):
        train_here([*wider, "resume_with_changes=true"], tmp_path / "run")


def test_accepted_changes_are_made_in_the_same_folder(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    summary, _ = train_here([*tiny, *AUTO, "optim.lr=1e-3", "resume_with_changes=true"], tmp_path / "run")

    assert checkpoint.read(summary.folder).config["optim"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # the same characters, so the same tokenizer
        ("the king and the queen of night are come to see what morning brings us\n" * 300, "trained on other documents"),
        ("the king and the queeN of night are come to see what morning brings us\n" * 300, "another tokenizer"),
    ],
)
def test_documents_that_changed_under_the_same_name_are_refused(tmp_path, text, message):
    tiny = corpus(tmp_path)
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    tokenizer = (tmp_path / "run" / "tokenizer.json").read_bytes()
    (tmp_path / "text.txt").write_text(text)

    with pytest.raises(ConfigError, match=message):
        train_here([*tiny, *AUTO], tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == tokenizer


def test_auto_needs_a_folder_that_the_command_names(tiny, tmp_path):
    cfg = configs.load([*tiny, "resume=auto"], on=Machine("cpu"))
    with pytest.raises(ConfigError, match=r"resume=auto(.|\n)*Add folder=runs/NAME"):
        settle(cfg, tmp_path / "2026-01-01_new", [], chosen=False)


def test_a_folder_that_a_live_process_trains_in_is_refused(tiny, tmp_path):
    overrides = [*tiny, *AUTO, "checkpoint.every=2"]

    def another():
        with pytest.raises(ConfigError, match="another process is training there"):
            train_here(overrides, tmp_path / "run")

    with in_step(4, another):
        train_here(overrides, tmp_path / "run")


def test_a_finished_run_has_nothing_to_resume(tiny, tmp_path):
    done, _ = train_here([*tiny, "train.steps=5"], tmp_path / "run")

    with pytest.raises(ConfigError, match=r"is at step 5: raise train\.steps=5"):
        train_here([f"resume={done.folder}"], tmp_path / "run")


@pytest.mark.parametrize("choice", ["auto", "PATH"])
def test_fewer_steps_than_were_done_are_refused(tiny, tmp_path, choice):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    resume = f"resume={tmp_path / 'run' if choice == 'PATH' else 'auto'}"

    for steps in (5, 6):  # the checkpoint is of step 6, which was not evaluated
        with pytest.raises(ConfigError, match=rf"is at step 6: raise train\.steps={steps}"):
            train_here([*tiny, resume, f"train.steps={steps}", "resume_with_changes=true"], tmp_path / "run")


def test_weights_of_the_hub_are_for_the_beginning_of_a_run(tiny, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(train.pretrained, "load", lambda model, source: loaded.append(source))
    overrides = [*tiny, *AUTO, "init_from=owner/name"]
    train_until(8, overrides, tmp_path / "run")
    train_here(overrides, tmp_path / "run")

    assert loaded == ["owner/name"]


def test_a_run_that_auto_finds_finished_is_left_alone(tiny, tmp_path):
    cfg = configs.load([*tiny, *AUTO, "train.steps=5"], on=Machine("cpu"))
    assert not settle(cfg, tmp_path / "run", [], chosen=True).finished
    train_here([*tiny, *AUTO, "train.steps=5"], tmp_path / "run")
    assert settle(cfg, tmp_path / "run", [], chosen=True).finished
    (tmp_path / "run" / "summary.json").unlink()  # as after a kill between the last checkpoint and the results
    assert not settle(cfg, tmp_path / "run", [], chosen=True).finished

    train_here([*tiny, *AUTO, "train.steps=5"], tmp_path / "run")
    assert settle(cfg, tmp_path / "run", [], chosen=True).finished


def test_a_resumed_run_that_goes_bad_at_once_names_what_it_went_on_from(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "good")

    def bad(forward, state, *rest):
        next(iter(state.model.parameters())).data[0, 0] = float("nan")
        return original(forward, state, *rest)

    original = train.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_step", bad)
        with pytest.raises(NonFiniteError, match=r"Last good checkpoint: .*good/checkpoints/step_00000006"):
            train_here([*tiny, f"resume={tmp_path / 'good'}"], tmp_path / "run")


# ---- a disk that is full, a thread that writes -----------------------------------------------------------------------------


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_full_disk_stops_the_run_with_its_last_checkpoint_whole(tiny, tmp_path, monkeypatch, background):
    overrides = [*tiny, *AUTO, f"checkpoint.background={background}", "eval.every=0"]
    train_here(overrides, tmp_path / "whole")
    original = checkpoint.write_tensors

    def full(file, tensors):
        if (tmp_path / "run" / "checkpoints" / storage.name(6)).exists():
            raise OSError(28, "No space left on device")
        original(file, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(StorageError, match=r"step_00000012 can't be written: No space left on device.*Earlier checkpoints"):
        train_here(overrides, tmp_path / "run")
    assert storage.newest(tmp_path / "run") == (tmp_path / "run" / "checkpoints" / storage.name(6), [])

    monkeypatch.setattr(checkpoint, "write_tensors", original)
    train_here(overrides, tmp_path / "run")
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


def test_a_full_disk_in_the_metrics_names_the_file(tiny, tmp_path, monkeypatch):
    def full():
        (tmp_path / "run" / "metrics.jsonl").unlink()
        (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")

    with in_step(4, full), pytest.raises(StorageError, match=r"metrics\.jsonl can't be written: No space left on device"):
        train_here([*tiny, "logging.every=1"], tmp_path / "run")


# ---- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_final_sample_keeps_the_summary_and_the_sample_is_made_up_for(tiny, tmp_path, monkeypatch, number):
    fake = FakeWandb(monkeypatch)
    overrides = [*tiny, *AUTO, "train.steps=5", "logging.wandb=offline"]
    original = GPT.generate
    monkeypatch.setattr(GPT, "generate", lambda *_, **__: signal.raise_signal(number))
    with pytest.raises(SystemExit) as stop:
        train_here(overrides, tmp_path / "run")

    assert stop.value.code == fake.exit_code == 128 + number
    assert read_json(tmp_path / "run" / "summary.json")["final"]["loss"] > 0
    assert not (tmp_path / "run" / "sample.txt").exists()
    monkeypatch.setattr(GPT, "generate", original)
    summary, _ = train_here(overrides, tmp_path / "run")
    assert (tmp_path / "run" / "sample.txt").read_text() == summary.sample != ""


def test_a_signal_while_a_thread_writes_waits_for_it(tiny, tmp_path):
    overrides = [*tiny, *AUTO, "checkpoint.background=true", "checkpoint.every=1"]

    assert stop_with(signal.SIGTERM, 4, overrides, tmp_path / "run") == 143
    assert storage.newest(tmp_path / "run") == (tmp_path / "run" / "checkpoints" / storage.name(4), [])


def test_a_step_waits_for_the_copy_alone_and_the_copy_is_of_its_own_step(tiny, tmp_path, monkeypatch):
    """The thread starts to write when two more steps are done; what it writes is still step 3's."""
    go = threading.Event()
    original = TrainState.parts
    stepped = []

    def slow(self, config, *, copied):
        parts = original(self, config, copied=copied)
        if self.step != 3:
            return parts
        first = next(iter(parts))
        return parts | {first: lambda file: (go.wait(60), parts[first](file))}

    monkeypatch.setattr(TrainState, "parts", slow)
    with in_step(6, lambda: (stepped.append(True), go.set())):
        train_here([*tiny, *AUTO, "checkpoint.background=true", "checkpoint.every=3", "checkpoint.keep=99"], tmp_path / "run")
    monkeypatch.setattr(TrainState, "parts", original)
    train_here([*tiny, *AUTO, "checkpoint.every=3", "checkpoint.keep=99"], tmp_path / "plain")

    assert stepped
    for name in ("model.safetensors", "training.safetensors"):
        files = [tmp_path / run / "checkpoints" / storage.name(3) / name for run in ("run", "plain")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_checkpoint_can_be_moved_and_read_alone(tiny, tmp_path):
    summary, _ = train_here([*tiny, "train.steps=5"], tmp_path / "run")
    shutil.copytree(summary.folder / "last", tmp_path / "elsewhere")

    assert checkpoint.read(tmp_path / "elsewhere").step == 5
