"""A run goes on only as what it was, where nobody else has it and while there is something left to do."""

import pytest
import torch

import configs
import train
from configs import ConfigError
from configs.machine import Machine
from tests.resume.stops import AUTO, in_step, train_until
from tests.runs import composed, corpus, train_here
from training import checkpoint, storage
from training.metrics import NonFiniteError
from training.resume import settle
from training.run import open_run


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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/nowhere", r"^resume=\S+/nowhere: no such file or folder\."),
        ("{}", r"^resume=\S+: no checkpoints in this folder"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused_by_its_key(tmp_path, path, message):
    cfg = composed([f"resume={path.format(tmp_path)}"])
    with pytest.raises(ConfigError, match=message):
        settle(cfg, tmp_path / "run", [], chosen=False)


def test_a_folder_that_a_live_process_trains_in_is_refused(tiny, tmp_path):
    overrides = [*tiny, *AUTO, "checkpoint.every=2"]

    def another():
        with pytest.raises(ConfigError, match="another process is training there"):
            train_here(overrides, tmp_path / "run")

    with in_step(4, another):
        train_here(overrides, tmp_path / "run")


def test_a_finished_run_has_nothing_to_resume(tiny, tmp_path):
    done, _ = train_here([*tiny, "train.steps=5"], tmp_path / "run")

    with pytest.raises(ConfigError, match=r"is at step 5: raise train\.steps=5") as error:
        train_here([f"resume={done.folder}"], tmp_path / "run")
    [command] = (line.split() for line in str(error.value).splitlines() if "train.py" in line)
    assert command[:2] == ["python", "train.py"]
    _, metrics = train_here([*command[2:], "sample.tokens=0"], tmp_path / "more")  # it does what it says
    assert metrics[-1]["step"] == 10


@pytest.mark.parametrize("choice", ["auto", "PATH"])
def test_fewer_steps_than_were_done_are_refused(tiny, tmp_path, choice):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    resume = f"resume={tmp_path / 'run' if choice == 'PATH' else 'auto'}"

    for steps in (5, 6):  # the checkpoint is of step 6, which was not evaluated
        with pytest.raises(ConfigError, match=rf"is at step 6: raise train\.steps={steps}"):
            train_here([*tiny, resume, f"train.steps={steps}", "resume_with_changes=true"], tmp_path / "run")


def test_weights_to_begin_with_are_for_the_beginning_of_a_run(tiny, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(train.pretrained, "load", lambda model, source, tokenizer: loaded.append(source))
    overrides = [*tiny, *AUTO, "init_from=owner/name"]
    train_until(8, overrides, tmp_path / "run")
    train_here(overrides, tmp_path / "run")

    assert loaded == ["owner/name"]
    with pytest.raises(ConfigError, match=r"^init_from=runs/other: a run that goes on has its weights already"):
        train_here([*overrides, "init_from=runs/other", "resume_with_changes=true"], tmp_path / "run")


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


def test_a_folder_that_another_process_trained_in_since_it_was_looked_at_is_refused(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    looked = settle(composed([*tiny, *AUTO]), tmp_path / "run", [], chosen=True)
    train_here([*tiny, *AUTO, "checkpoint.keep=9"], tmp_path / "run")
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}

    with pytest.raises(ConfigError, match="another process has just trained there"), open_run(looked, torch.device("cpu")):
        pass
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == names


def test_checkpoints_that_change_while_they_are_looked_at_are_looked_at_again(tiny, tmp_path, monkeypatch):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    original, looks = storage.newest, []

    def meanwhile(run):
        if not looks:
            looks.append(run)
            (run / "checkpoints" / storage.name(6)).rename(run / "checkpoints" / storage.name(9))  # another process keeps one
            return None, ["step_00000006 is damaged: it is missing"]
        return original(run)

    monkeypatch.setattr(storage, "newest", meanwhile)
    found = settle(composed([*tiny, *AUTO]), tmp_path / "run", [], chosen=True)

    assert found.checkpoints == (tmp_path / "run" / "checkpoints" / storage.name(9),)
    assert not any("damaged" in note for note in found.notes)
