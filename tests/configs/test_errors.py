"""What a user reads after a mistake: the key, what was given, what is accepted, what to do."""

import re

import pytest
import torch

import configs
from configs import ConfigError, command_line, machine
from configs.machine import Machine
from configs.schema import Device
from tests.runs import CPU

# overrides, and a part of the message; {…} in overrides is one override
NAMES = """
norm.imp=torch                  norm.imp: no such key. Did you mean norm.impl? Keys of norm: impl, kind, eps, dropout_masks.
+norm.fusd=1                    norm.fusd: no such key. Did you mean norm.impl=fused?
steps=10                        steps: no such key. Did you mean train.steps?
modl=gpt2                       modl: no such key. Did you mean model?
model=gtp2                      model=gtp2: no such option. Did you mean model=gpt2?
experiment=null                 experiment=null: no such option.
model=[tiny,gpt2]               Several options make several runs: -m model=A,B.
data=text,shakespeare           data=text,shakespeare: no such option.
optim={lrr: 1}                  optim.lrr: no such key. Did you mean optim.lr?
eval.evry=3                     `python train.py --help` lists all keys.
ablate.steps=3                  `python ablate.py --help` lists its own keys.
+train.steps=3                  Either remove + prefix: 'train.steps=3'
~norm.impl                      no key can be taken away
train.steps                     train.steps: an override is written key=value
data.files=[a.txt,~/b]          the shell around those: 'data.files=[a.txt,"~/b"]'.
folder=~/runs                   Hydra needs quotes around this value, and the shell around those: 'folder="~/runs"'.
"""
TYPES = """
norm.impl=fusd                  norm.impl=fusd: must be one of fused, torch. Did you mean fused?
train.steps=1.5                 train.steps=1.5: must be a whole number.
optim.lr=fast                   optim.lr=fast: must be a number.
optim.lr=???                    optim.lr: must be a number.
train.compile=maybe             train.compile=maybe: must be true or false.
model.kv_heads=two              model.kv_heads=two: must be a whole number or null.
logging.tags=a                  logging.tags=a: must be a list [a,b] or null. Use logging.tags=[a].
optim=3                         optim=3: optim is a group of keys. Set one of them: optim.lr,
logging.name=${oc.env:NO_SUCH}  Environment variable 'NO_SUCH' not found
"""
RULES = """
model.heads=3                   model.heads=3 does not divide model.width=128.
model.kv_heads=3                model.kv_heads=3 does not divide model.heads=4.
model.positions=rotary model.width=12                         needs an even head width; model.width / model.heads is 3.
train.batch_size=10 train.accumulation=4                      train.batch_size=10 can't be cut into equal micro-batches by
model.dropout=1                 model.dropout=1.0: must be at least 0 and less than 1.
optim.warmup_steps=20 train.steps=10                          optim.warmup_steps=20 is more than train.steps=10
optim.min_lr=1                  optim.min_lr=1 is more than optim.lr=0.004
train.compile_mode=fast         Use default, reduce-overhead,
optim.lr=0                      optim.lr=0.0: must be more than 0 and finite.
optim.lr=nan                    optim.lr=nan: must be more than 0 and finite.
seed=99999999999999999999       seed=99999999999999999999: must be at least 0 and less than 9223372036854775808.
data=text                       data.source=text needs data.files
data.files=[a.txt]              data.files is read only with data.source=text
data.path=a                     data.path is read only with data.source=hub
data.source=hub                 data.source=hub needs data.path
tokenizer.kind=pretrained       tokenizer.kind=pretrained needs tokenizer.pretrained
tokenizer.vocab_size=200        tokenizer.vocab_size=200: must be at least 257.
train.precision=fp16            train.precision=fp16 needs a CUDA device; this run is on cpu
parallel=ddp                    parallel=ddp needs several processes: torchrun --nproc-per-node=N
"""
CASES = [re.split(" {2,}", line) for line in (NAMES + TYPES + RULES).splitlines() if line]
GRAPHS = "train.compile=true train.compile_mode=reduce-overhead"
MACHINES = [
    ("", Machine("mps"), "needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."),
    ("train.precision=bf16", Machine("cuda", bf16=False), "Use train.precision=fp16 or fp32."),
    (GRAPHS, Machine("cuda", ranks=2, by_torchrun=True), "makes CUDA graphs, which are for a single process"),
    ("train.batch_size=6", Machine("cpu", ranks=4), "by train.accumulation=1 × 4 ranks."),
]


@pytest.mark.parametrize(("overrides", "on", "message"), [(overrides, CPU, message) for overrides, message in CASES] + MACHINES)
def test_a_mistake_is_answered_with_key_value_and_remedy(overrides, on, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        configs.load([overrides] if "{" in overrides else overrides.split(), on=on)


def test_a_rank_without_a_gpu_of_its_own_is_refused_and_one_rank_of_torchrun_is_not(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"this node has 2 GPUs.* Use --nproc-per-node=2"):
        machine.inspect(Device.cuda)
    assert machine.inspect(Device.cpu).ranks == 4
    assert configs.load(["parallel=ddp"], on=Machine("cpu", by_torchrun=True)).norm.impl == "fused"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("model.heads=0 optim.lr=-1 train.batch_size=3 train.accumulation=2", ["model.heads", "optim.lr"]),
        ("model.heads=3 train.batch_size=3 train.accumulation=2", ["model.heads", "train.batch_size"]),
    ],
)
def test_all_numbers_out_of_range_or_else_all_broken_rules_are_reported_at_once(overrides, expected):
    with pytest.raises(ConfigError) as error:
        configs.load(overrides.split(), on=CPU)
    assert [re.split("[:=]", line)[0] for line in str(error.value).splitlines()] == expected


def test_a_sweep_is_every_combination():
    jobs = list(command_line.jobs(["norm.impl=fused,torch", "seed=range(1,3)", "train.steps=5", "model=tiny"], sweep=True))
    assert jobs == [[f"norm.impl={i}", f"seed={s}", "train.steps=5", "model=tiny"] for i in ("fused", "torch") for s in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m norm.impl=fused,toch seed=1,2", "norm.impl=toch: must be one of fused, torch."),  # before the first starts
        ("norm.impl=fused,torch", "norm.impl=fused,torch: several values make several runs; add -m."),
        ("-m optim.lr=interval(0,1)", "optim.lr=interval(0,1): a sweep needs its values: optim.lr=A,B"),
        ("train.steps=5 -m seed=1,2", "seed=1,2: options such as -m stand before all of key=value, or behind, not between"),
        ("--train.steps=3", "--train.steps=3: no such option. Settings are written key=value"),
        ("--cfg job norm.imp=x", "norm.imp: no such key."),
        ("folder=/dev/null/x", "/dev/null/x: no run can be kept there, as /dev/null can't be written."),
    ],
)
def test_a_mistake_of_the_command_line_ends_with_one_message_and_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    given = ["device=cpu", *arguments.split()] if arguments[0] != "-" else arguments.split()
    with pytest.raises(SystemExit, match="2"):
        command_line.check(given)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # for a developer, the traceback
    with pytest.raises(ConfigError):
        command_line.check(given)


@pytest.mark.parametrize("arguments", ["-m train.steps=5 seed=1,2", "train.steps=5 seed=1,2 -m", "--cfg job seed=3", "--help"])
def test_options_stand_before_or_behind_the_keys(arguments):
    command_line.check(arguments.split())
