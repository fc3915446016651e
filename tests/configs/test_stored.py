"""Stored configs are plain data: what one holds is read again as the same text, and reads nothing of the environment."""

import json
import random
import shlex

import pytest

import configs
from configs import ConfigError
from configs.compose import as_typed
from tests.runs import CPU
from training import checkpoint
from training.tracking import agent_job

TEXTS = [
    *("${oc.env:SECRET}", "${", "\\${a}", "\\\\${a}", "a\\", 'it\'s "so"', "a: b # c", "\t\n", "2024_01_05", "1e5", "None"),
    *("null", "true", "~", "é × 漢", " a ", "a,b", "[a]", "{a: 1}", ""),
]


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SECRET", "leaked")


def with_text(text):
    cfg = configs.load([], on=CPU)
    cfg.sample.prompt, cfg.logging.name, cfg.logging.tags, cfg.data.files = text, text, [text], [text, "b"]
    return cfg


@pytest.mark.parametrize("text", TEXTS)
def test_a_stored_text_is_read_as_the_same_text_from_every_store(text, tmp_path):
    cfg = with_text(text)
    (tmp_path / "config.yaml").write_text(configs.to_yaml(cfg), encoding="utf-8")
    state = json.loads(json.dumps(configs.to_dict(cfg)))  # as in a checkpoint
    for read in (configs.from_dict(state), configs.read_yaml(tmp_path / "config.yaml"), configs.from_dict(state, ["seed=1"])):
        assert read == cfg


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_as_it_is_advised_to_be_typed_is_that_text_on_the_command_line(text):
    choose = random.Random(0)
    for one in (text, *("".join(choose.choices([*"\\$\"'{}:, [a", "${", "\n", text], k=6)) for _ in range(20))):
        (word,) = shlex.split(as_typed("sample.prompt", one))
        assert configs.from_dict({}, [word]).sample.prompt == one
    assert configs.compose_only([word]).sample.prompt == one


def test_what_a_command_interpolates_is_resolved_once(monkeypatch):
    cfg = configs.compose_only(["logging.name=${oc.env:SECRET}", r'sample.prompt="\${oc.env:SECRET}"'])
    assert (cfg.logging.name, cfg.sample.prompt) == ("leaked", "${oc.env:SECRET}")
    assert configs.from_dict(configs.to_dict(cfg)).sample.prompt == "${oc.env:SECRET}"


def test_the_values_of_an_agents_sweep_are_plain_too(tmp_path, monkeypatch):
    (tmp_path / "sweep.yaml").write_text("wandb_version: 1\nsample.prompt:\n  value: ${oc.env:SECRET}\n")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(tmp_path / "sweep.yaml"))
    assert agent_job() == ("sweep_s", "sample.prompt-${oc.env:SECRET}")


@pytest.mark.parametrize(
    "text", ["a: [", "just text", "- 1\n", "!!python/object/apply:os.getcwd []\n", "norm:\n  impl: fsed\n"]
)
def test_a_config_yaml_that_can_not_be_read_is_named(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml can't be read"):
        configs.read_yaml(tmp_path / "config.yaml")


def test_a_checkpoint_without_a_config_is_refused_by_name(tmp_path):
    (tmp_path / checkpoint.STATE).write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        checkpoint.read(tmp_path, verified=True)
