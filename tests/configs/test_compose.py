"""Composition: what overrides, groups and experiments make of the schema's defaults, and how a config is stored and resumed."""

import json
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import pytest

import configs
from configs import ConfigError, keys, rules
from configs.compose import as_typed
from configs.machine import Machine
from configs.schema import NormImpl, Precision
from tests.runs import CPU
from training import export

GPU = Machine(device="cuda")
PRESETS = [f"{path.parent.name}={path.stem}" for path in keys.FOLDER.glob("*/*.yaml") if path.parent.name in keys.GROUPS]
# Keys that decide which numbers a run gives
MATTERS = "model.dropout=0.2 norm.eps=1e-6 norm.kind=rmsnorm data.val_fraction=0.2 tokenizer.vocab_size=300 optim.lr=1e-3 "
MATTERS += "train.batch_size=4 train.accumulation=2 train.precision=bf16 train.steps=5000 seed=2"
# Keys that a run may change when it goes on
FREE = "data.cache_dir=x norm.impl=torch norm.dropout_masks=shared train.compile=true loss.impl=torch "
FREE += "train.recompute=true device=cpu eval.every=7 checkpoint.every=3 "
FREE += "logging.wandb=disabled sample.tokens=1 resume=auto folder=x seed=1"
TEXTS = ["${oc.env:SECRET}", r"\${a}", r"\\${a}", "a\\", 'it\'s "so"', "a: b # c", "\t\n", "2024_01_05", "None", "é × 漢", ""]


@pytest.fixture(scope="module")
def plain():
    """The config of a plain run, as it is stored."""
    return configs.to_dict(configs.load(on=CPU))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_rules_on_a_gpu(preset):
    needs = {"data=text": ["data.files=[a.txt]"], "data=hub": ["data.path=owner/name"]}.get(preset, [])
    assert configs.load([preset, "train.steps=600000", *needs], on=GPU).train.steps == 600000


def test_groups_and_keys_become_values_of_the_schemas_types():
    overrides = ["norm.impl=torch", "model=gpt2", "data=tinystories", "train.steps=500", "optim.lr=1", "train.precision=bf16"]
    cfg = configs.load(overrides, on=CPU)
    assert (cfg.model.layers, cfg.model.width, cfg.data.name, cfg.train.steps) == (12, 768, "tinystories", 500)
    assert cfg.norm.impl is NormImpl.torch and cfg.train.precision is Precision.bf16 and isinstance(cfg.optim.lr, float)
    assert configs.load(["data=hub", "data.path=.."], on=CPU).data.name == Path("..").resolve().name


def test_the_command_line_wins_over_an_experiment_and_the_experiment_over_its_groups():
    gpt2 = configs.load(["experiment=gpt2_124m"], on=GPU)
    assert (gpt2.train.batch_size * gpt2.model.context, gpt2.optim.lr, gpt2.optim.beta2) == (491_520, 6e-4, 0.95)
    cfg = configs.load(["experiment=shakespeare_char", "model=gpt2", "train.steps=7000", "model.layers=2"], on=GPU)
    assert (cfg.model.layers, cfg.model.width, cfg.train.steps, cfg.tokenizer.kind) == (2, 768, 7000, "char")


def test_a_stored_config_takes_overrides_of_keys_and_defaults_for_new_keys(plain):
    older = {**plain, "norm": {"kind": "rmsnorm"}, "data": {**plain["data"], "processes": 4}}
    older["train"] = {**plain["train"], "compile_loss": False, "compile_mode": "default"}
    older |= {"ablate": {"cycles": 12}, "compare": {"fresh": 8}}
    older["checkpoint"] = {**plain["checkpoint"], "background": True}
    del older["loss"]
    cfg = configs.from_dict(older, ["train.steps=9", "norm.impl=torch"])
    assert (cfg.norm.kind, cfg.norm.dropout_masks, cfg.train.steps, cfg.norm.impl) == ("rmsnorm", "native", 9, "torch")
    assert cfg.loss.impl == "torch"
    assert cfg.optim.warmup_steps == 45  # of the steps that the run began with


@pytest.mark.parametrize("text", TEXTS)
def test_a_stored_text_is_read_as_the_same_text_from_every_store_and_reads_nothing_of_the_environment(
    text, tmp_path, monkeypatch
):
    monkeypatch.setenv("SECRET", "leaked")
    cfg = configs.from_dict({})
    cfg.sample.prompt, cfg.logging.name, cfg.logging.tags, cfg.data.files = text, text, [text], [text, "b"]
    (tmp_path / "config.yaml").write_text(configs.to_yaml(cfg), encoding="utf-8")
    state = json.loads(json.dumps(configs.to_dict(cfg)))  # as in a checkpoint
    for read in (configs.from_dict(state), configs.read_yaml(tmp_path / "config.yaml"), configs.from_dict(state, ["seed=1"])):
        assert read == cfg
    if not text.endswith("\\"):
        (word,) = shlex.split(as_typed("sample.prompt", text))
        assert configs.from_dict({}, [word]).sample.prompt == text


def test_what_a_command_interpolates_is_resolved_once(monkeypatch):
    monkeypatch.setenv("SECRET", "leaked")
    cfg = configs.compose_only(["logging.name=${oc.env:SECRET}", r'sample.prompt="\${oc.env:SECRET}"'], configs.Config)
    assert (cfg.logging.name, cfg.sample.prompt) == ("leaked", "${oc.env:SECRET}")


@pytest.mark.parametrize("text", ["a: [", "just text", "!!python/object/apply:os.getcwd []\n", "norm:\n  impl: fsed\n"])
def test_a_stored_config_that_can_not_be_read_is_named(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml can't be read"):
        configs.read_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=gpt2", "model=gpt2: a resumed run keeps its groups"),
        ("optim.kind=muon", "optim.kind=muon: the checkpoint has the state of adamw, which can't go on as muon."),
    ],
)
def test_a_resumed_run_refuses_what_no_key_of_it_can_be(plain, override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        rules.check_resumed(configs.from_dict(plain), configs.from_dict(plain, [override]))


def test_a_resumed_run_refuses_what_would_make_it_another_run_and_takes_it_on_request(plain):
    before, changes = configs.from_dict(plain), MATTERS.split()
    with pytest.raises(ConfigError) as error:
        rules.check_resumed(before, configs.from_dict(plain, changes))
    names = [change.partition("=")[0] for change in changes]
    *differences, remedy = str(error.value).splitlines()
    assert sorted(line.partition("=")[0] for line in differences) == sorted(names)
    assert all(re.match(r"(\S+)=\S+: the checkpoint was made with \1=\S+\.$", line) for line in differences)
    assert "resume_with_changes=true" in remedy
    accepted = rules.check_resumed(before, configs.from_dict(plain, [*changes, "resume_with_changes=true"]))
    assert sorted(accepted) == sorted(names)
    assert rules.check_resumed(before, configs.from_dict(plain, FREE.split())) == []


@pytest.mark.parametrize(("schedule", "refused"), [("constant", False), ("cosine", True), ("wsd", True)])
def test_more_steps_are_refused_where_the_rates_of_earlier_ones_depend_on_them(plain, schedule, refused):
    stored = {**plain, "optim": {**plain["optim"], "schedule": schedule}}
    with pytest.raises(ConfigError, match=r"train\.steps") if refused else nullcontext():
        rules.check_resumed(configs.from_dict(stored), configs.from_dict(stored, ["train.steps=5000"]))


def test_keys_that_weights_depend_on_are_compared_by_init_from_and_export(plain):
    before = configs.from_dict(plain)
    after = configs.from_dict(plain, ["norm.placement=post", "seed=2", "norm.impl=torch"])
    assert export.differences(before, after, 300) == ["norm.placement=pre: it has post."]
    assert "norm.placement=post: it has pre." in export.unsupported(export.GPT2, after)
    assert set(keys.affecting("weights")) >= export.SIZES.keys() | {key for of in export.NAMES.values() for key in of.values()}
    assert not export.unsupported(export.GPT2, configs.load(["model=gpt2"], on=CPU))
