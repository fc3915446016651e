"""Which keys a run that goes on may have otherwise than it was stopped with."""

import re
from contextlib import nullcontext

import pytest

import configs
from configs import ConfigError
from configs.machine import Machine

CPU = Machine(device="cpu")

MATTERS = [
    *("model.dropout=0.2", "model.context=64", "norm.eps=1e-6", "norm.kind=rmsnorm", "data.val_fraction=0.2"),
    *("tokenizer.vocab_size=300", "optim.beta2=0.9", "optim.lr=1e-3", "train.batch_size=4", "train.accumulation=2"),
    *("train.precision=bf16", "train.steps=5000", "seed=2"),
]


@pytest.mark.parametrize("override", MATTERS)
def test_a_run_that_goes_on_refuses_what_would_make_it_another_run(override):
    stored = configs.to_dict(configs.load(on=CPU))
    key, _, _ = override.partition("=")

    with pytest.raises(ConfigError) as error:
        configs.rules.check_resumed(configs.from_dict(stored), configs.from_dict(stored, [override]))

    first, *rest = str(error.value).splitlines()
    assert re.match(rf"{key}=\S+: the checkpoint was made with {key}=\S+\.$", first)
    assert len(rest) == 1 and "resume_with_changes=true" in rest[0]


def test_every_difference_is_shown_and_can_be_accepted():
    stored = configs.to_dict(configs.load(on=CPU))
    before = configs.from_dict(stored)

    with pytest.raises(ConfigError) as error:
        configs.rules.check_resumed(before, configs.from_dict(stored, MATTERS))
    assert len(str(error.value).splitlines()) == len(MATTERS) + 1
    accepted = configs.rules.check_resumed(before, configs.from_dict(stored, [*MATTERS, "resume_with_changes=true"]))
    assert sorted(accepted) == sorted(override.partition("=")[0] for override in MATTERS)


def test_a_run_that_goes_on_takes_other_machines_intervals_and_operators():
    stored = configs.to_dict(configs.load(on=CPU))
    overrides = [
        *("data.processes=2", "data.cache_dir=x", "norm.impl=torch", "norm.dropout_masks=shared", "train.compile=true"),
        *("train.compile_loss=true", "train.compile_mode=reduce-overhead", "train.recompute=true"),
        *("device=cpu", "eval.every=7", "checkpoint.every=3", "checkpoint.background=true", "logging.wandb=disabled"),
        *("sample.tokens=1", "resume=auto", "folder=x", "seed=1"),
    ]

    assert configs.rules.check_resumed(configs.from_dict(stored), configs.from_dict(stored, overrides)) == []


@pytest.mark.parametrize(("schedule", "refused"), [("constant", False), ("cosine", True), ("wsd", True)])
def test_more_steps_are_refused_where_the_rates_of_earlier_ones_depend_on_them(schedule, refused):
    stored = configs.to_dict(configs.load([f"optim.schedule={schedule}"], on=CPU))

    with pytest.raises(ConfigError, match=r"train\.steps") if refused else nullcontext():
        configs.rules.check_resumed(configs.from_dict(stored), configs.from_dict(stored, ["train.steps=5000"]))
