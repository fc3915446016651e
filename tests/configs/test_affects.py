"""What depends on a key is said where the key is declared, and every list of keys follows from it."""

from dataclasses import dataclass, field

import pytest

import configs
from configs import Config, ConfigError, keys, rules, schema
from configs.schema import ModelConfig, NormKind
from ops import Norm
from training import export, pretrained


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

        for module in (keys, configs.compose, pretrained, export):
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
    assert pretrained._differences(before, after, 300) == ["model.shape=usual: it has other."]
    assert not export.unsupported(export.GPT2, before.model, before.norm, before.loss)
    assert export.unsupported(export.GPT2, after.model, after.norm, after.loss) == ["model.shape=other, the layout has usual"]
    with pytest.raises(ConfigError, match=r"model\.shape=other: the checkpoint was made with model\.shape=usual"):
        rules.check_resumed(before, after)


@pytest.mark.parametrize(("affects", "resumes"), [("results", False), ("speed", True), ("nothing", True)])
def test_a_new_key_of_anything_else_is_compared_where_it_matters(with_key, affects, resumes):
    before, after = pair(with_key(affects))
    assert not pretrained._differences(before, after, 300) and not export.unsupported(
        export.GPT2, after.model, after.norm, after.loss
    )
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
