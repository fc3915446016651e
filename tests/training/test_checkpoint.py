"""Checkpoints are whole, readable without running code, and complete."""

import os
from pathlib import Path

import pytest
import torch

import configs
from configs import ConfigError
from configs.machine import Machine
from data.tokenizer import char_tokenizer
from model import GPT
from training import checkpoint
from training.checkpoint import TrainState
from training.optimizer import adamw

SMALL = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=8"]


@pytest.fixture
def cfg():
    return configs.load(SMALL, on=Machine("cpu"))


def new_state(cfg, seed=0, step=0, tokenizer="a", scaled=False):
    torch.manual_seed(seed)
    model = GPT(cfg.model, cfg.norm, vocab_size=50)
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", enabled=scaled), tokenizer, step)
    model(torch.randint(50, (2, 8)), torch.randint(50, (2, 8))).backward()
    state.optimizer.step()
    return state


def test_everything_comes_back(cfg, tmp_path):
    state = new_state(cfg, step=7)
    state.save(tmp_path / "last.pt", cfg)
    other = new_state(cfg, seed=1)

    other.restore(checkpoint.read(tmp_path))

    assert other.step == 7
    for ours, theirs in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(state.optimizer.state[ours]["exp_avg"], other.optimizer.state[theirs]["exp_avg"])
        assert torch.equal(state.optimizer.state[ours]["exp_avg_sq"], other.optimizer.state[theirs]["exp_avg_sq"])


def test_the_optimizers_settings_are_those_of_the_new_config(cfg, tmp_path):
    new_state(cfg).save(tmp_path / "last.pt", cfg)
    wanted = ["optim.weight_decay=0.5", "optim.beta1=0.7", "optim.beta2=0.8", "optim.eps=1e-5"]
    other = new_state(configs.load([*SMALL, *wanted], on=Machine("cpu")))

    other.restore(checkpoint.read(tmp_path))

    groups = other.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.7, 0.8), 1e-5) for group in groups)


def test_another_tokenizer_is_refused_before_anything_is_restored(cfg, tmp_path):
    new_state(cfg, step=7).save(tmp_path / "last.pt", cfg)
    other = new_state(cfg, tokenizer="b")

    with pytest.raises(ConfigError, match="another tokenizer"):
        other.restore(checkpoint.read(tmp_path))
    assert other.step == 0


def test_a_fingerprint_is_of_the_tokenizers_ids(tmp_path):
    prints = []
    for alphabet in ("abc", "cba", "abd"):
        char_tokenizer(alphabet).save(tmp_path / "tokenizer.json")
        prints.append(checkpoint.fingerprint(tmp_path / "tokenizer.json"))

    assert prints[0] == prints[1] != prints[2]


def test_the_scale_of_fp16_gradients_comes_back(cfg, tmp_path):
    state, other = (new_state(cfg, scaled=True) for _ in range(2))
    state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 32.0, "_growth_tracker": 5})
    state.save(tmp_path / "last.pt", cfg)

    other.restore(checkpoint.read(tmp_path))

    assert other.scaler.state_dict() == state.scaler.state_dict()
    assert other.scaler.get_scale() == 32.0


def test_reading_needs_no_code(cfg, tmp_path):
    new_state(cfg).save(tmp_path / "last.pt", cfg)

    stored = torch.load(tmp_path / "last.pt", weights_only=True)

    assert configs.from_dict(stored["config"]) == cfg


def fail(*_):
    raise OSError("disk full")


@pytest.mark.parametrize("where", ["torch.save", "os.fsync", "Path.replace"])
def test_a_failure_at_any_moment_leaves_the_old_checkpoint_whole(cfg, tmp_path, monkeypatch, where):
    path = tmp_path / "last.pt"
    new_state(cfg, step=1).save(path, cfg)
    module, _, name = where.partition(".")
    monkeypatch.setattr({"torch": torch, "os": os, "Path": Path}[module], name, fail)

    with pytest.raises(OSError, match="disk full"):
        new_state(cfg, step=2).save(path, cfg)

    assert checkpoint.read(path)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_what_a_killed_write_left_is_written_over(cfg, tmp_path, monkeypatch):
    path, pid = tmp_path / "last.pt", os.getpid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process tidies nothing up
        with pytest.raises(OSError, match="disk full"):
            new_state(cfg, step=1).save(path, cfg)
    assert len(list(tmp_path.iterdir())) == 1

    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    new_state(cfg, step=2).save(path, cfg)

    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_the_file_is_on_disk_before_it_has_its_name_and_then_the_name(cfg, tmp_path, monkeypatch):
    calls = []
    for owner, name in ((os, "fsync"), (Path, "replace")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, original=original, name=name: (calls.append(name), original(*args))[1])

    new_state(cfg).save(tmp_path / "last.pt", cfg)

    assert calls == ["fsync", "replace", "fsync"]


def test_weights_of_another_shape_are_refused(cfg, tmp_path):
    new_state(cfg).save(tmp_path / "last.pt", cfg)
    wider = configs.load([*SMALL, "model.width=32"], on=Machine("cpu"))

    with pytest.raises(ConfigError, match="do not fit this model"):
        new_state(wider).restore(checkpoint.read(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"hello"])
def test_a_torn_file_is_named(tmp_path, content):
    (tmp_path / "last.pt").write_bytes(content)

    with pytest.raises(ConfigError, match=r"last\.pt: not a readable checkpoint"):
        checkpoint.read(tmp_path)


def test_somebody_elses_file_is_refused(tmp_path):
    torch.save({"model": {}}, tmp_path / "x.pt")

    with pytest.raises(ConfigError, match="not a checkpoint of this program"):
        checkpoint.read(tmp_path / "x.pt")


def test_a_missing_run_is_answered_with_those_that_exist(cfg, tmp_path):
    (tmp_path / "a").mkdir()
    new_state(cfg).save(tmp_path / "a" / "last.pt", cfg)
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=r"no such file or folder\. Latest runs beside it: a"):
        checkpoint.read(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"no last\.pt in this folder"):
        checkpoint.read(tmp_path / "empty")
