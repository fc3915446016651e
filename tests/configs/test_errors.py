"""What a user reads after a mistake: the key, what was given, what is accepted, what to do."""

import re
from contextlib import nullcontext

import pytest
import torch

import configs
from configs import ConfigError, machine, rules
from configs.machine import Machine
from configs.schema import DeviceKind
from tests.runs import CPU

# overrides, and a part of the message; {…} in overrides is one override
COMPOSED = r"""
norm.imp=torch                  norm.imp: no such key. Did you mean norm.impl? Keys of norm: norm.impl, norm.kind,
lr=1                            lr: no such key. Did you mean optim.lr?
model=gtp2                      llama nanogpt_char olmo qwen tiny Did you mean gpt2?
optim={lrr: 1}                  optim.lrr: no such key. Did you mean optim.lr?
data={name: 2024_01_05}         data.name: Value '20240105' of type 'int' is incompatible with type hint
+norm.imp=torch                 norm.imp: no such key. Did you mean norm.impl?
nrom.impl=torch                 nrom: no such key. Did you mean norm?
compare.fresh=2                 compare: compare.py has such keys, train.py has none. `python compare.py --help` lists them.
folder=~/runs                   quotes for Hydra within quotes for the shell: 'folder="~/runs"'
norm.impl=fusd                  norm.impl: Invalid value 'fusd', expected one of [fused, torch, compiled, flash_attn
folder=2024_01_05               folder: Value '20240105' of type 'int' is incompatible with type hint
init_from=None                  init_from=None: null gives it no value.
resume=true                     true or false needs quotes, as in 'KEY="TEXT"'.
model=null                      Config group override must be a string or a list.
data.files=a.txt                data.files: Invalid value assigned: str is not a ListConfig, list or tuple. Write a list as
sample.prompt=${HOME}           sample.prompt: Interpolation key 'HOME' not found.
train.graph=yes_please          train.graph=yes_please: needs train.graph=auto,true,false
"""
RULES = """
model.heads=3                   model.heads=3 does not divide model.width=128.
model.kv_heads=3                model.kv_heads=3 does not divide model.heads=4.
model.positions=rotary model.width=12                         needs an even head width; model.width / model.heads is 3.
train.batch_size=10 train.accumulation=4                      train.batch_size=10 can't be cut into equal micro-batches by
norm.placement=inside model.block=parallel                    model.block=parallel: needs norm.placement=pre or model.block=seq
model.residual_scale=deepnorm   model.residual_scale=deepnorm, norm.placement=pre: needs model.residual_scale!=
norm.kind=derf model.qk_norm=true                             model.qk_norm_kind=null, norm.kind=derf: needs
norm.impl=liger norm.kind=dyt   norm.impl=liger needs norm.kind=layernorm,rmsnorm; here norm.kind=dyt.
model.dropout=1                 model.dropout=1.0: must be at least 0 and below 1.
tokenizer.vocab_size=5          tokenizer.vocab_size=5: must be at least 257.
optim.warmup_steps=20 train.steps=10                          optim.warmup_steps=20 is more than train.steps=10
optim.min_lr=1                  optim.min_lr=1 is more than optim.lr=0.001
optim.lr=nan                    optim.lr=nan: must be finite.
seed=99999999999999999999       seed=99999999999999999999: must be at least 0 and below 9223372036854775808.
data.source=text                data.source=text needs data.files
data.source=hub                 data.source=hub needs data.path
parallel=ddp                    parallel=ddp needs several processes: torchrun --nproc-per-node=N
"""
CUDA = Machine("cuda")
MACHINES = [
    ("", Machine("mps"), "needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."),
    ("train.precision=bf16", Machine("cuda", bf16=False), "Use train.precision=fp16 or fp32."),
    ("train.batch_size=6", Machine("cpu", ranks=4), "by train.accumulation=1 × 4 ranks."),
    ("norm.impl=flash_attn model.dropout=0.1 norm.dropout_masks=shared", CUDA, "masks=native; here model."),
    ("norm.impl=liger model.dropout=0.1", CUDA, "needs model.dropout=0; here model.dropout=0.1"),
    ("norm.impl=quack", CUDA, "needs norm.kind=rmsnorm; here norm.kind=layernorm"),
    ("norm.impl=liger", CPU, "needs a CUDA device; this run is on cpu"),
]
ACCEPTED = ["norm.impl=flash_attn model.dropout=0.1", "norm.impl=quack norm.kind=rmsnorm"]


def cases(text):
    return [tuple(re.split(" {2,}", line)) for line in text.splitlines() if line]


@pytest.mark.parametrize(("overrides", "message"), cases(COMPOSED))
def test_a_mistake_in_a_name_or_a_type_is_answered_with_key_value_and_remedy(overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        configs.load([overrides] if "{" in overrides else overrides.split(), on=CPU)


@pytest.mark.parametrize(("overrides", "on", "message"), [(given, CPU, said) for given, said in cases(RULES)] + MACHINES)
def test_a_broken_rule_is_answered_with_key_value_and_remedy(overrides, on, message, monkeypatch):
    monkeypatch.setattr(rules, "is_installed", lambda package: True)
    for accepted in ACCEPTED if "norm.impl" in overrides else []:
        rules.check(configs.from_dict({}, accepted.split()), CUDA)
    cfg = configs.from_dict({}, overrides.split())
    with pytest.raises(ConfigError, match=re.escape(message)):
        rules.check(cfg, on)


def test_a_rank_without_a_gpu_of_its_own_is_refused_and_one_rank_of_torchrun_is_not(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"this node has 2 GPUs.* Use --nproc-per-node=2"):
        machine.inspect(DeviceKind.cuda)
    assert machine.inspect(DeviceKind.cpu).ranks == 4
    rules.check(configs.from_dict({}, ["parallel=ddp"]), Machine("cpu", by_torchrun=True))


def test_all_numbers_out_of_range_or_else_all_broken_rules_are_reported_at_once():
    for heads, expected in ((0, ["model.heads", "optim.lr"]), (3, ["model.heads", "train.batch_size"])):
        given = [f"model.heads={heads}", "train.batch_size=3", "train.accumulation=2", f"optim.lr={-1 if heads == 0 else 1}"]
        with pytest.raises(ConfigError) as error:
            rules.check(configs.from_dict({}, given), CPU)
        assert [re.split("[:=]", line)[0] for line in str(error.value).splitlines()] == expected


DRAWS = "train.recompute=true model.dropout=0.1"


@pytest.mark.parametrize(
    ("given", "machine", "why"),
    [
        ("", CUDA, ""),
        ("train.compile=true train.accumulation=2 optim.kind=muon", CUDA, ""),
        ("train.graph=false", CUDA, "train.graph=false"),
        ("", CPU, "this run is on cpu"),
        ("", Machine("cuda", ranks=2, by_torchrun=True), "torchrun started this one"),
        ("profile=true", CUDA, "which operator launched a kernel"),
        (DRAWS, CUDA, "draws dropout"),
        (f"{DRAWS} model.attention_dropout=0", CUDA, ""),
        (f"{DRAWS} model.attention_dropout=0 norm.impl=torch", CUDA, "draws"),
    ],
)
def test_what_can_be_no_cuda_graph_says_why_and_is_refused_where_one_is_asked_for(given, machine, why):
    given = given.split()
    cfg = configs.from_dict({}, given)
    rules.check(cfg, machine)
    found = rules.why_no_graph(cfg, machine)
    assert (why in found) if why else not found
    if cfg.train.graph == "auto":
        with pytest.raises(ConfigError, match=rf"train\.graph=true: .*{why}.* Use train\.graph=auto") if why else nullcontext():
            rules.check(configs.from_dict({}, [*given, "train.graph=true"]), machine)
