"""A run goes on only as what it was, where nobody else has it. What is damaged is named, what is whole is used and kept."""

import shutil
from pathlib import Path

import pytest

import configs
import train
from configs.schema import Precision
from tests.resume.stops import AUTO, in_step, refused, train_until
from tests.runs import composed, corpus, newest, read_json, train_here
from training import checkpoint, storage
from training.start import find_start


@pytest.fixture
def command(tiny):
    return [*tiny, *AUTO]


@pytest.fixture(scope="module")
def died(tiny, tmp_path_factory):
    return train_until(14, [*tiny, *AUTO], tmp_path_factory.mktemp("died") / "run")


@pytest.fixture
def folder(died, tmp_path):
    """Of a run that died in step 14; its checkpoints are of steps 6, 10 and 12. The same command resumes it."""
    return Path(shutil.copytree(died, tmp_path / "run"))


def test_a_checkpoint_of_another_model_or_of_as_many_steps_is_refused_with_the_difference(folder, command):
    fewer = [*command, "train.steps=12", "resume_with_changes=true"]  # its last step was not evaluated
    refused(fewer, folder, r"is at step 12 of train\.steps=12: nothing is left to train")
    wider = [*command, "model.width=64", "optim.beta2=0.9"]
    said = refused(wider, folder, r"model.width=64: the checkpoint was made with model.width=32\.")
    assert "optim.beta2=0.9: the checkpoint was made with optim.beta2=0.99." in said
    refused([*wider, "resume_with_changes=true"], folder, r"step_00000012 do not fit this model: (.|\n)*size mismatch")


def test_a_change_that_is_accepted_takes_effect_also_in_the_optimizer(folder, command):
    changes = ["optim.weight_decay=0.5", "optim.beta1=0.7", "optim.beta2=0.8", "optim.eps=1e-5", "resume_with_changes=true"]
    with in_step(13, lambda state: groups.extend(state.optimizer.param_groups)):
        groups: list[dict] = []
        summary, _ = train_here([*command, *changes], folder)
    assert summary.folder == folder and checkpoint.read(folder).cfg.optim.eps == 1e-5
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.7, 0.8), 1e-5) for group in groups)


def test_text_that_changed_is_refused_and_the_words_of_the_refusal_help_but_it_may_lie_elsewhere(tmp_path):
    (tmp_path / "before").mkdir()
    overrides = [*corpus(tmp_path / "before"), *AUTO]
    folder = train_until(8, overrides, tmp_path / "run")
    (tmp_path / "before").rename(tmp_path / "after")
    keys = [f"data.files=[{tmp_path}/after/*.txt]", f"data.cache_dir={tmp_path}/new_cache", "data.name=another"]
    stored = read_json(newest(folder) / "state.json")["config"]
    start = find_start(configs.from_dict(stored, [*keys, f"resume={folder}"]), folder, keys, chosen=False)
    assert start.in_place and start.folder == folder
    refused([f"resume={folder}"], folder, "matches no file")

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    text = "the king and the queen of night are come to see what morning brings us\n" * 300
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "text.txt").write_text(text.replace("queen", "queeN"))  # and so another tokenizer
    refused(overrides, folder, "data: the files")
    accepted = [f"resume={folder}", "resume_with_changes=true", "train.steps=12"]
    said = refused(accepted, tmp_path / "more", "another tokenizer")
    accepted += [word for word in said.split() if word.startswith("tokenizer.") and "=" in word]
    (tmp_path / "before" / "text.txt").write_text(text)
    summary, after = train_here(accepted, tmp_path / "more")
    assert summary.folder == tmp_path / "more" and after[0]["step"] > 6, "a changed run has a folder of its own"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_finished_run_has_nothing_to_resume_and_without_its_checkpoints_is_not_written_over(tiny, tmp_path):
    done, _ = train_here([*tiny, "train.steps=5"], tmp_path / "run")
    said = refused([f"resume={done.folder}"], tmp_path / "run", r"is at step 5 of train\.steps=5: nothing is left to train")
    [command] = (line.partition("python train.py ")[2].split() for line in said.splitlines() if "train.py" in line)
    _, metrics = train_here([*command, "sample.tokens=0"], tmp_path / "more")  # it does what it says
    assert metrics[-1]["step"] == 10
    shutil.rmtree(done.folder / "checkpoints")
    refused([*tiny, "resume=auto", "train.steps=5"], done.folder, "a finished run whose checkpoints are gone")


def test_weights_to_begin_with_are_for_the_beginning_of_a_run(tiny, tmp_path, monkeypatch):
    loaded = []
    monkeypatch.setattr(train.export, "load", lambda model, source, tokenizer: loaded.append(source))
    overrides = [*tiny, *AUTO, "init_from=owner/name"]
    folder = train_until(8, overrides, tmp_path / "run")
    train_here(overrides, folder)
    assert loaded == ["owner/name"]
    overrides += ["init_from=runs/other", "resume_with_changes=true"]
    refused(overrides, folder, r"^init_from=runs/other: a run that goes on has its weights already")


def test_a_resumed_run_keeps_its_precision_on_another_device(tiny, tmp_path):
    folder = train_until(8, [*tiny, *AUTO, "train.precision=bf16"], tmp_path / "run")
    cfg = composed([*tiny, *AUTO])
    assert cfg.train.precision is Precision.auto  # which would be fp32 on this CPU
    assert find_start(cfg, folder, [], chosen=True).cfg.train.precision is Precision.bf16


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(folder, command, capsys):
    def damage(path):
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # every kind of it: training/test_storage.py

    damaged = Path(shutil.copytree(folder, folder.with_name("damaged")))
    damage(newest(folder) / "state.json")
    _, lines = train_here(command, folder)
    said = capsys.readouterr().out
    assert "step_00000012/state.json: it is not as it was written; the one before it is used" in said
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 31))
    assert (folder / "checkpoints" / "damaged_step_00000012").is_dir()
    for saved in storage.checkpoints(damaged):
        damage(saved / "model.safetensors")
    for choice in ("auto", damaged):
        refused([*command, f"resume={choice}"], damaged, r"step_00000010/model\.safetensors(.|\n)*No checkpoint in .* is whole")


def test_checkpoints_that_were_copied_alone_are_the_runs_and_never_anothers(folder, command, tiny, tmp_path, capsys):
    shutil.copytree(folder / "checkpoints", tmp_path / "copy" / "checkpoints")
    refused([*command, "seed=2"], tmp_path / "copy", "seed=2: the checkpoint was made with seed=1")
    summary, _ = train_here([*tiny, "seed=2", "train.steps=3"], tmp_path / "copy")
    said = f"{tmp_path}/copy has another run already, so this one is kept in {tmp_path}/copy_2.\n"
    assert summary.folder == tmp_path / "copy_2" and said in capsys.readouterr().out
    _, metrics = train_here(command, tmp_path / "copy")
    assert metrics[0]["step"] == 13
