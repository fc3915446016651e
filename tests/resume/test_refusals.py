"""A run goes on only as what it was, where nobody else has it and while there is something left to do."""

import pytest
import torch

import train
from configs import ConfigError
from tests.resume.stops import AUTO, in_step, train_until
from tests.runs import composed, corpus, train_here
from training import checkpoint
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
    summary, _ = train_here([*tiny, *AUTO, "optim.lr=1e-3", "resume_with_changes=true"], tmp_path / "run")
    assert summary.folder == tmp_path / "run" and checkpoint.read(summary.folder).config["optim"]["lr"] == 1e-3


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
    with pytest.raises(ConfigError, match=r"resume=auto(.|\n)*Add folder=runs/NAME"):
        settle(composed([*tiny, "resume=auto"]), tmp_path / "2026-01-01_new", [], chosen=False)
    with pytest.raises(ConfigError, match=r"^resume=\S+/nowhere: no such file or folder\."):
        settle(composed([f"resume={tmp_path}/nowhere"]), tmp_path / "run", [], chosen=False)


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


def test_a_folder_that_another_process_trained_in_since_it_was_looked_at_is_refused(tiny, tmp_path):
    train_until(8, [*tiny, *AUTO], tmp_path / "run")
    looked = settle(composed([*tiny, *AUTO]), tmp_path / "run", [], chosen=True)
    train_here([*tiny, *AUTO, "checkpoint.keep=9"], tmp_path / "run")
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    with pytest.raises(ConfigError, match="another process has just trained there"), open_run(looked, torch.device("cpu")):
        pass
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == names
