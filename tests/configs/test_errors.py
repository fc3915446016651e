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
model.heads=3                   model.heads=3 does not divide model.width=128. Use model.heads=2 or model.width=120.
model.heads=5 model.width=12    Use model.heads=4 or model.width=40.
model.kv_heads=3                model.kv_heads=3 does not divide model.heads=4. Use model.kv_heads=2
model.positions=rotary model.width=12                         even head width or model.positions=learned
model.vocab_size=100 tokenizer.vocab_size=512                 model.vocab_size=100 is smaller than tokenizer.vocab_size=512.
train.batch_size=10 train.accumulation=4                      by train.accumulation=4. Use train.batch_size=12
model.dropout=1                 model.dropout=1.0: must be at least 0 and less than 1.
optim.warmup_steps=20 train.steps=10                          optim.warmup_steps=20 is more than train.steps=10
optim.min_lr=1                  optim.min_lr=1 is more than optim.lr=0.004
train.compile_mode=fast         Use default, reduce-overhead,
train.compile_mode=max-autotune-no-cudagraphs                 for ablate.py that is ablate.compile=true
train.compile=true train.compile_mode=max-autotune deterministic=true                     Use one of them
train.compile=true train.compile_mode=reduce-overhead         needs a CUDA device; this run is on cpu
optim.beta2=1                   optim.beta2=1.0: must be at least 0 and less than 1.
model.heads=7 model.width=100   Use model.heads=5 or model.width=112.
optim.lr=0                      optim.lr=0.0: must be more than 0 and finite.
optim.lr=nan                    optim.lr=nan: must be more than 0 and finite.
seed=99999999999999999999       seed=99999999999999999999: must be at least 0 and less than 9223372036854775808.
sample.prompt=''                sample.prompt is empty
resume=                         resume is empty. Use never, auto, or
data=text                       data.source=text needs data.files
data.files=[a.txt]              data.files is read only with data.source=text
data.path=a                     data.path is read only with data.source=hub
data.source=hub                 data.source=hub needs data.path
data.streaming=true data.processes=2                          Use data.processes=1
tokenizer.kind=pretrained       tokenizer.kind=pretrained needs tokenizer.pretrained
tokenizer.vocab_size=200        Use at least 257
logging.without_key=online      logging.without_key=online
train.precision=fp16            train.precision=fp16 needs a CUDA device; this run is on cpu
parallel=ddp                    parallel=ddp: this process is alone. Start several with torchrun
"""
CASES = [re.split(" {2,}", line) for line in (NAMES + TYPES + RULES).splitlines() if line]
TWO_GPUS = Machine("cuda", gpus=2, ranks=2, by_torchrun=True)
GRAPHS = "train.compile=true train.compile_mode=reduce-overhead"
MACHINES = [
    ("", Machine("mps"), "needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."),
    ("", Machine("cuda", triton=False), "Install triton, or use norm.impl=torch."),
    ("train.precision=bf16", Machine("cuda", bf16=False), "Use train.precision=fp16 or fp32."),
    ("train.compile=true", Machine("cpu", cpp_compiler=False), "train.compile=true needs a C++ compiler on the CPU"),
    ("train.compile_loss=true", Machine("cpu", cpp_compiler=False), "train.compile_loss=true needs a C++ compiler"),
    (GRAPHS, TWO_GPUS, "makes CUDA graphs, which are for a single process"),
    (f"{GRAPHS} parallel=fsdp", TWO_GPUS, "compiles part by part, in the default mode. Use train.compile_mode=default."),
    ("train.batch_size=6", Machine("cpu", ranks=4), "× 4 ranks. Use train.batch_size=8"),
    ("norm.impl=torch", Machine("mps", ranks=2, by_torchrun=True), "torchrun has started 2 ranks. Use device=cpu."),
    ("norm.impl=torch parallel=fsdp", Machine("mps", by_torchrun=True), "no collectives on mps"),
    ("", Machine("cuda", ranks=4, local_rank=2, gpus=2, by_torchrun=True), "--nproc-per-node=2"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "on", "message"), [(overrides, CPU, message) for overrides, message in CASES] + MACHINES)
def test_a_mistake_is_answered_with_key_value_and_remedy(overrides, on, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        configs.load([overrides] if "{" in overrides else overrides.split(), on=on)


@pytest.mark.parametrize(
    ("capabilities", "bf16"), [({"avx2": True, "avx512_bf16": False}, False), ({"avx512_bf16": True}, True), ({}, True)]
)
def test_a_cpu_without_bf16_is_known_and_neither_it_nor_one_rank_of_torchrun_is_refused(capabilities, bf16, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    on = machine.inspect(Device.cpu)
    assert on.bf16 is bf16
    assert configs.load(["train.precision=bf16"], on=on).train.precision == "bf16"
    assert configs.load(["parallel=ddp"], on=Machine("cpu", by_torchrun=True)).norm.impl == "fused"


def test_all_broken_rules_are_reported_at_once_and_a_number_out_of_range_breaks_no_other_rule():
    with pytest.raises(ConfigError) as error:
        configs.load(["model.heads=0", "optim.lr=-1", "train.batch_size=3", "train.accumulation=2"], on=CPU)
    keys = [re.split("[:=]", line)[0] for line in str(error.value).splitlines()]
    assert keys == ["model.heads", "optim.lr", "train.batch_size"]


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
        ("hydra.run.dir=a folder=b", "hydra.run.dir=a and folder=b both name the run's folder. Leave one out.\n"),
        ("hydra.run.dir=/dev/null/x", "/dev/null/x: no run can be kept there (Not a directory). Use another folder=PATH.\n"),
        ("-m hydra.sweep.dir=/proc/x seed=1,2", "/proc/x: no run can be kept there"),
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
