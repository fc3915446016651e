"""A key that a command gives and that does nothing there is refused, by what its declaration says of where it counts."""

import re
from operator import attrgetter

import pytest

import configs
from ablation.variants import variants_of
from configs import ConfigError, keys, rules
from study.arms import study_of
from study.config import Config
from tests.runs import CPU

# a command, in which the last key does nothing; how to make it count; what the message says of it
IDLE = """
norm.alpha=0.4  norm.kind=derf  with norm.kind=dyt,derf; here norm.kind=layernorm
norm.kind=dyt norm.eps=1e-6  model.qk_norm=true model.qk_norm_kind=rmsnorm  with norm.kind=layernorm,rmsnorm or model
model.dropout=0.1 norm.dropout_masks=shared  norm.impl=torch  with norm.impl=torch,compiled and model
norm.impl=torch norm.dropout_masks=shared  model.dropout=0.1  with norm.impl=torch,compiled and model.dropout!=0;
model.rotary_base=500  model.positions=rotary  with model.positions=rotary; here model.positions=learned
model.qk_norm_kind=rmsnorm  model.qk_norm=true  with model.qk_norm=true
train.precision=fp32 model.residual_dtype=compute  train.precision=bf16  with train.precision!=fp32
loss.impl=torch loss.chunks=4  loss.impl=fused  with loss.impl=fused
data.text_field=body  data.source=text data.files=[a.csv]  with data.source=text,hub; here data.source=shakespeare
data.files=[a.txt]  data.source=text  with data.source=text
data.streaming=true  data.source=hub data.path=a/b  with data.source=hub
data.source=hub data.path=a/b data.val_split=v data.val_fraction=0.2  data.val_split=null  with data.val_split=null; here data
tokenizer.kind=char tokenizer.vocab_size=500  tokenizer.kind=bpe  with tokenizer.kind=bpe
tokenizer.pretrained=a/b  tokenizer.kind=pretrained  with tokenizer.kind=pretrained
optim.momentum=0.9  optim.kind=muon  with optim.kind=muon; here optim.kind=adamw
optim.decay_fraction=0.1  optim.schedule=wsd  with optim.schedule=wsd; here optim.schedule=cosine
optim.schedule=constant optim.min_lr=1e-5  optim.schedule=wsd  with optim.schedule=cosine,wsd
sample.tokens=0 sample.prompt=a  sample.tokens=1  with sample.tokens!=0
sample.temperature=0 sample.top_k=5  sample.temperature=1  with sample.tokens!=0 and sample.temperature!=0
logging.wandb=offline logging.without_key=disabled  logging.wandb=online  with logging.wandb=null,online
logging.wandb=disabled logging.tags=[a]  logging.wandb=offline  with logging.wandb!=disabled
resume_with_changes=true  resume=auto  with resume!=never
"""
CASES = [re.split(" {2,}", line) for line in IDLE.splitlines() if line]


@pytest.mark.parametrize(("idle", "remedy", "said"), CASES)
def test_a_key_that_does_nothing_is_refused_where_it_is_given_and_taken_where_it_counts(idle, remedy, said):
    *_, key = (text.partition("=")[0] for text in idle.split())
    with pytest.raises(ConfigError, match=re.escape(f"{key} is read only {said}")):
        rules.check_given(configs.given(idle.split()), [configs.from_dict({}, idle.split())])
    counts = [*idle.split(), *remedy.split()]
    cfg = configs.from_dict({}, counts)
    rules.check(cfg, CPU)
    rules.check_given(configs.given(counts), [cfg])
    assert keys.counts(key, cfg)


def test_what_a_file_of_a_group_or_a_stored_config_sets_may_do_nothing_and_null_is_nothing():
    assert configs.load(["model=olmo", "model.positions=learned"], on=CPU).model.rotary_base == 500_000
    stored = configs.to_dict(configs.load(["optim.kind=muon", "optim.momentum=0.9"], on=CPU))
    assert configs.from_dict(stored, ["optim.kind=adamw"]).optim.momentum == 0.9
    configs.load(["optim.schedule=constant", "optim.min_lr=null", "sample.temperature=0", "sample.top_k=null"], on=CPU)


def test_a_key_counts_if_it_does_in_one_arm_and_a_programs_own_keys_in_that_program_alone():
    cpu = "device=cpu"
    study = study_of([cpu, "norm.kind=rmsnorm,dyt", "norm.alpha=0.4"])
    assert [arm.cfg.norm.alpha for arm in study.arms] == [0.4, 0.4]
    variants_of([cpu, "norm.dropout_masks=shared", "model.dropout=0.0,0.1"])
    variants_of([cpu, "ablate.switch=loss", "loss.chunks=4"])
    ladder = ["study=ladder", "data.files=[a.txt]", cpu]
    idle = ("compare.equal_time", "compare.all_pairs", "compare.timing_cycles")
    with pytest.raises(ConfigError, match=r"compare\.all_pairs is read only .* here compare.sizes={2M,4M,"):
        study_of([*ladder, "compare.all_pairs=true"], "2M")
    with pytest.raises(ConfigError, match=r"logging\.wandb=offline: compare\.sizes is in no W&B run"):
        study_of([*ladder, "logging.wandb=offline"], "2M")
    sizes = configs.compose_only(ladder[:1], Config)
    assert all(keys.counts(name, study.cfg) and not keys.counts(name, sizes) for name in idle)
    with pytest.raises(ConfigError, match=r"norm\.alpha is read only "):
        variants_of([cpu, "norm.alpha=1"])
    for read, command, program in ((variants_of, "compare.diverged=2", "ablate"), (study_of, "ablate.cycles=9", "compare")):
        with pytest.raises(ConfigError, match=rf"{command.partition('.')[0]}: .* {program}\.py has none"):
            read([cpu, command])


def test_where_a_key_counts_is_said_in_names_and_values_that_exist():
    for name, key in keys.schema().items():
        for other, values in re.findall(r"([\w.]+)!?=(\S+)", keys.only(name, key)):
            for value in values.split(","):
                cfg = configs.from_dict({}, [f"{other}={value}"])
                assert keys.shown(attrgetter(other)(cfg)) in (value, f"{value}.0")
