"""What depends on a key is said where the key is declared, and every list of keys follows from it."""

from dataclasses import dataclass, field

import pytest

import configs
from configs import Config, ConfigError, keys, rules, schema
from configs.schema import ModelConfig, NormKind
from ops import Norm
from tests.runs import CPU
from training import export


@pytest.fixture
def pair(monkeypatch):
    """A function: two configs that differ in model.shape, a key that a branch would add, on which this depends."""

    def pair(affects):
        @dataclass
        class Model(ModelConfig):
            shape: str = schema.key("usual", "a kind of block", affects=affects)

        @dataclass
        class More(Config):
            model: Model = field(default_factory=Model)

        for module in (keys, configs.compose, export):
            monkeypatch.setattr(module, "Config", More, raising=True)
        keys.schema.cache_clear()
        return More(), More(model=Model(shape="other"))

    yield pair
    monkeypatch.undo()
    keys.schema.cache_clear()


@pytest.mark.parametrize(("affects", "resumes"), [("weights", False), ("results", False), ("speed", True), ("nothing", True)])
def test_a_new_key_is_compared_by_init_from_export_and_resume_where_it_matters(pair, affects, resumes):
    before, after = pair(affects)
    weights = affects == "weights"
    assert export.differences(before, after, 300) == ["model.shape=usual: it has other."] * weights
    assert ("model.shape=other: it has usual." in export.unsupported(export.GPT2, after)) == weights
    assert "model.shape" not in str(export.unsupported(export.GPT2, before))
    if resumes:
        assert rules.check_resumed(before, after) == []
    else:
        with pytest.raises(ConfigError, match=r"model\.shape=other: the checkpoint was made with model\.shape=usual"):
            rules.check_resumed(before, after)


def test_the_kinds_of_norm_are_those_of_the_ops_and_gpt2_has_a_layout_for_export():
    assert {kind.value for kind in NormKind} <= {norm.name for norm in Norm}
    assert set(keys.affecting("weights")) >= export.SIZES.keys() | {key for of in export.NAMES.values() for key in of.values()}
    assert not export.unsupported(export.GPT2, configs.load(["model=gpt2"], on=CPU))
