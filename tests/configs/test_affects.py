"""What depends on a key is said where the key is declared, and every list of keys follows from it."""

from dataclasses import dataclass, field, fields

import pytest

import configs
from configs import Config, ConfigError, keys, rules, schema
from configs.schema import ModelConfig, NormKind
from model import GPT
from ops import Norm
from tests.runs import CPU
from training import export


@pytest.fixture
def with_key(monkeypatch):
    """A function: the schema as a branch would have it that adds model.shape, on which this depends."""

    def with_key(affects):
        @dataclass
        class Model(ModelConfig):
            shape: str = schema.key("usual", "a kind of block", affects=affects)

        @dataclass
        class More(Config):
            model: Model = field(default_factory=Model)

        for module in (keys, configs.compose, export):
            monkeypatch.setattr(module, "Config", More, raising=True)
        keys.schema.cache_clear()
        return More

    yield with_key
    monkeypatch.undo()
    keys.schema.cache_clear()


def pair(More):
    """A config, and one that differs in the new key."""
    before, after = More(), More()
    after.model.shape = "other"
    return before, after


def test_a_new_key_of_the_weights_is_compared_by_init_from_export_and_resume(with_key):
    before, after = pair(with_key("weights"))
    assert export.differences(before, after, 300) == ["model.shape=usual: it has other."]
    assert "model.shape" not in str(export.unsupported(export.GPT2, before))
    assert "model.shape=other: it has usual." in export.unsupported(export.GPT2, after)
    with pytest.raises(ConfigError, match=r"model\.shape=other: the checkpoint was made with model\.shape=usual"):
        rules.check_resumed(before, after)


@pytest.mark.parametrize(("affects", "resumes"), [("results", False), ("speed", True), ("nothing", True)])
def test_a_new_key_of_anything_else_is_compared_where_it_matters(with_key, affects, resumes):
    before, after = pair(with_key(affects))
    assert not export.differences(before, after, 300) and "model.shape" not in str(export.unsupported(export.GPT2, after))
    if resumes:
        assert rules.check_resumed(before, after) == []
    else:
        with pytest.raises(ConfigError, match=r"model\.shape=other"):
            rules.check_resumed(before, after)


@pytest.mark.parametrize("name", ["norm.impl", "train.compile", "profile", "deterministic"])
def test_ablate_refuses_the_keys_that_it_sets_itself(name):
    with pytest.raises(ConfigError, match=f"{name}=1: {name} (is|would)"):
        rules.check_ablation(["seed=1", f"{name}=1"])


def test_every_kind_of_norm_in_the_schema_is_one_of_the_ops():
    assert {kind.value for kind in NormKind} <= {norm.name for norm in Norm}


def test_every_weight_key_but_the_expressed_ones_is_one_value_in_a_layout():
    assert set(keys.affecting("weights")) >= export.SIZES.keys() | {key for of in export.NAMES.values() for key in of.values()}
    assert {one.name for one in fields(Config)} >= {name.partition(".")[0] for name in keys.schema()}
    cfg = configs.load(["model=gpt2"], on=CPU)
    assert not export.unsupported(export.GPT2, cfg)


def test_a_cap_of_the_logits_belongs_to_the_weights():
    plain, capped = Config(), Config()
    capped.loss.softcap = 30.0
    assert "loss.softcap=30.0: it has null." in export.unsupported(export.GPT2, capped)
    assert export.differences(plain, capped, 300) == ["loss.softcap=null: it has 30.0."]
    model = GPT(capped.model, capped.norm, 300, capped.loss)
    assert not export.differences(Config(model=model.cfg, norm=model.norm, loss=model.loss), capped, 300)
