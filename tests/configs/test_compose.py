"""Composition: what overrides, groups and experiments make of the schema's defaults."""

from pathlib import Path

import pytest

import configs
from configs import ConfigError, keys
from configs.machine import Machine
from configs.schema import Config, NormImpl, NormKind, Precision
from training.step import learning_rate

GPU = Machine(device="cuda")
CPU = Machine(device="cpu")

PRESETS = [f"{group}={option}" for group, options in keys.groups().items() for option in options]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_passes_the_rules_on_a_gpu(preset):
    needs = {"data=text": ["data.files=[a.txt]"], "data=hub": ["data.path=owner/name"]}.get(preset, [])

    cfg = configs.load([preset, "train.steps=600000", *needs], on=GPU)

    assert isinstance(cfg, Config)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_begins_with_the_command_that_uses_it(preset):
    group, option = preset.split("=")
    text = (keys.FOLDER / group / f"{option}.yaml").read_text(encoding="utf-8")

    commands = [line for line in text.splitlines()[:2] if line.startswith("# python train.py")]

    assert commands, f"{preset} does not say how it is used"
    assert text.startswith("# ")


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")

    cfg = configs.load(['folder="~/runs/mine"', 'resume="~/runs/theirs"'], on=CPU)

    assert (cfg.folder, cfg.resume) == ("/home/me/runs/mine", "/home/me/runs/theirs")


def test_types_are_the_schemas():
    cfg = configs.load(["norm.impl=torch", "norm.kind=rmsnorm", "optim.lr=1", "train.precision=bf16"], on=CPU)

    assert cfg.norm.impl is NormImpl.torch
    assert cfg.norm.kind is NormKind.rmsnorm
    assert cfg.train.precision is Precision.bf16
    assert isinstance(cfg.optim.lr, float)


def test_the_readmes_command_composes_as_written():
    overrides = ["norm.impl=torch", "norm.kind=rmsnorm", "model=gpt2", "data=tinystories", "train.steps=500"]

    cfg = configs.load(overrides, on=CPU)

    assert (cfg.model.layers, cfg.model.width, cfg.data.name, cfg.train.steps) == (12, 768, "tinystories", 500)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("", "shakespeare"),
        ("data=text data.files=[a.txt]", "text"),
        ("data.source=text data.files=[a.txt]", "text"),
        ("data=hub data.path=owner/Stories", "Stories"),
        ("data.source=hub data.path=owner/Stories", "Stories"),
        ("data=hub data.path=/disk/my_corpus/", "my_corpus"),
        ("data=hub data.path=..", Path("..").resolve().name),
        ("data=hub data.path=owner/Stories data.name=mine", "mine"),
    ],
)
def test_a_corpus_is_called_by_what_it_is_unless_it_is_given_a_name(overrides, name):
    cfg = configs.load(overrides.split(), on=CPU)

    assert cfg.data.name == name
    assert configs.from_dict(configs.to_dict(cfg)).data.name == name


def test_a_group_on_the_command_line_wins_over_the_experiments_choice():
    cfg = configs.load(["experiment=shakespeare_char", "model=gpt2"], on=GPU)

    assert (cfg.model.layers, cfg.model.width, cfg.model.context) == (12, 768, 1024)
    assert cfg.tokenizer.kind == "char"  # what was not named stays the experiment's


def test_a_value_on_the_command_line_wins_over_the_experiments():
    cfg = configs.load(["experiment=gpt2_124m", "train.steps=7000", "model.layers=2"], on=GPU)

    assert (cfg.train.steps, cfg.model.layers, cfg.model.width) == (7000, 2, 768)


def test_shakespeare_char_is_nanogpts_recipe():
    cfg = configs.load(["experiment=shakespeare_char"], on=GPU)

    model, optim = cfg.model, cfg.optim
    assert (model.layers, model.heads, model.width, model.context, model.dropout, model.bias) == (6, 6, 384, 256, 0.2, False)
    assert (optim.lr, optim.warmup_steps, optim.beta2, optim.weight_decay) == (1e-3, 100, 0.99, 0.1)
    assert learning_rate(cfg.train.steps, cfg.train.steps, optim) == pytest.approx(1e-4)
    assert (cfg.train.batch_size, cfg.train.steps, cfg.tokenizer.kind, optim.clip_norm) == (64, 5000, "char", 1.0)


def test_gpt2_124m_has_half_a_million_tokens_a_batch():
    cfg = configs.load(["experiment=gpt2_124m"], on=GPU)

    assert cfg.train.batch_size * cfg.model.context == 491_520
    assert (cfg.optim.lr, cfg.optim.beta2, cfg.train.compile) == (6e-4, 0.95, True)
    assert learning_rate(cfg.train.steps, cfg.train.steps, cfg.optim) == pytest.approx(6e-5)


def test_a_config_survives_the_way_through_plain_containers():
    cfg = configs.load(["experiment=shakespeare_char", "logging.tags=[a,b]", "model.kv_heads=2"], on=CPU)

    assert configs.from_dict(configs.to_dict(cfg)) == cfg


def test_plain_containers_hold_plain_types_only():
    def leaves(tree):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value) if isinstance(value, dict | list) else [value]

    plain = configs.to_dict(configs.load(on=CPU))

    assert {type(leaf) for leaf in leaves(plain)} <= {str, int, float, bool, type(None)}


def test_overrides_change_single_keys_of_a_stored_config():
    stored = configs.to_dict(configs.load(["model=gpt2", "seed=7"], on=CPU))

    cfg = configs.from_dict(stored, ["train.steps=9", "norm.impl=torch"])

    assert (cfg.model.layers, cfg.seed, cfg.train.steps, cfg.norm.impl) == (12, 7, 9, NormImpl.torch)


def test_the_warm_up_is_settled_at_the_start_and_stays_when_steps_are_added():
    cfg = configs.load(["train.steps=400"], on=CPU)

    assert cfg.optim.warmup_steps == 20
    assert configs.from_dict(configs.to_dict(cfg), ["train.steps=4000"]).optim.warmup_steps == 20


def test_a_stored_config_of_an_older_version_takes_defaults_for_new_keys():
    stored = configs.to_dict(configs.load(on=CPU))
    del stored["norm"]["dropout_masks"]

    assert configs.from_dict(stored).norm.dropout_masks == "native"


def test_a_group_can_not_be_chosen_anew_for_a_stored_config():
    stored = configs.to_dict(configs.load(on=CPU))

    with pytest.raises(ConfigError, match="model=gpt2: a resumed run keeps its model"):
        configs.from_dict(stored, ["model=gpt2"])
