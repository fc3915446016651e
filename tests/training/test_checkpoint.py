"""What a checkpoint holds comes back, is read without running code, and names what does not fit."""

import json

import pytest
import torch

import configs
from configs import ConfigError
from model import GPT
from tests.runs import composed
from training import checkpoint, storage
from training.checkpoint import TrainState, Validation
from training.step import adamw

SMALL = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=8"]


@pytest.fixture
def cfg():
    return composed(SMALL)


def new_state(cfg, seed=0, step=0, scaled=False):
    torch.manual_seed(seed)
    model = GPT(cfg.model, cfg.norm, vocab_size=50)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    state = TrainState(model, adamw(model, cfg.optim), scaler, tokenizer="a", step=step)
    model(torch.randint(50, (2, 8)), torch.randint(50, (2, 8))).backward()
    state.optimizer.step()
    return state


def save(state, run, cfg):
    return storage.commit(run, state.step, state.parts(configs.to_dict(cfg), copied=False))


def test_everything_comes_back(cfg, tmp_path):
    state, other = new_state(cfg, step=7, scaled=True), new_state(cfg, seed=1, scaled=True)
    state.scaler.load_state_dict(state.scaler.state_dict() | {"scale": 32.0, "_growth_tracker": 5})
    state.loss_sum, state.losses = torch.tensor(0.1) + torch.tensor(0.2), 2  # a sum that no short decimal has
    state.validation, state.best, state.best_step = Validation(0.1 + 0.2, 1 / 3), Validation(0.1, 1e-300), 3
    state.owes_validation = True
    save(state, tmp_path, cfg)
    other.restore(checkpoint.read(tmp_path))
    assert torch.equal(other.loss_sum, state.loss_sum)
    for name in ("step", "losses", "validation", "best", "best_step", "owes_validation"):
        assert getattr(other, name) == getattr(state, name)
    assert other.scaler.state_dict() == state.scaler.state_dict() and other.scaler.get_scale() == 32.0
    for ours, theirs in zip(state.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state.optimizer.state[ours][name], other.optimizer.state[theirs][name])


def test_the_optimizers_settings_are_those_of_the_new_config(cfg, tmp_path):
    save(new_state(cfg), tmp_path, cfg)
    wanted = ["optim.weight_decay=0.5", "optim.beta1=0.7", "optim.beta2=0.8", "optim.eps=1e-5"]
    other = new_state(composed([*SMALL, *wanted]))
    other.restore(checkpoint.read(tmp_path))
    groups = other.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.7, 0.8), 1e-5) for group in groups)


def test_no_file_of_a_checkpoint_can_hold_code(cfg, tmp_path):
    saved = save(new_state(cfg), tmp_path, cfg)
    assert {path.suffix for path in saved.iterdir()} == {".safetensors", ".json", ""}  # "": the sums
    assert configs.from_dict(json.loads((saved / "state.json").read_text())["config"]) == cfg


@pytest.mark.parametrize("name", ["state.json", "SHA256SUMS"])
def test_a_torn_file_is_named(cfg, tmp_path, name):
    (save(new_state(cfg), tmp_path, cfg) / name).write_bytes(b"hello")
    with pytest.raises(ConfigError, match=rf"step_00000000: not a readable checkpoint: .*{name}"):
        checkpoint.read(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    save(new_state(cfg), tmp_path, cfg)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="not a checkpoint of this program"):
        checkpoint.read(tmp_path)


def test_a_missing_run_is_answered_with_those_that_exist(cfg, tmp_path):
    save(new_state(cfg), tmp_path / "a", cfg)
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.pt").write_bytes(b"")
    messages = {"b": r"no such file or folder\..*: a\.", "empty": "no checkpoints in this folder", "old.pt": "is a file"}
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=rf"{name}:? {message}"):
            checkpoint.read(tmp_path / name)
