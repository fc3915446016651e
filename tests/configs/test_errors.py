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
norm.imp=torch                  norm.imp: no such key. Did you mean norm.impl? Keys of norm: norm.impl, norm.kind,
+norm.fusd=1                    norm.fusd: no such key. Keys of norm: norm.impl,
steps=10                        steps: no such key. Did you mean train.steps?
optm.lr=1                       optm.lr: no such key. Did you mean optim.lr?
modl=gpt2                       modl: no such key. Did you mean model?
model=gtp2                      model=gtp2: no such option. Did you mean gpt2? Options of model: gemma, gpt2, gpt2_large,
norm.impl=fused,torch           To sweep over it, add --multirun to your command line
optim={lr: 1}                   optim: several keys; set one of them.
optim.lr=1 optim=null           optim: several keys; set one of them.
experiment=null                 must be a string
+train.steps=3                  Either remove + prefix: 'train.steps=3'
train.steps                     train.steps: Hydra can't read this. Write key=value
folder=~/runs                   quotes for Hydra within quotes for the shell: 'folder="~/runs"'
"""
TYPES = """
norm.impl=fusd                  norm.impl: Invalid value 'fusd', expected one of [fused, torch, compiled, flash_attn
train.steps=1.5                 train.steps: Value '1.5' of type 'float' could not be converted to Integer.
train.steps=null                train.steps: field 'train.steps' is not Optional.
data.files=/a/b.txt             data.files: Invalid value assigned: str is not a ListConfig, list or tuple.
logging.tags=a,b                1. To use it as a list, use key=[value1,value2]
logging.tags=[2024_01]          logging.tags=[2024_01]: is text, which needs quotes here
folder=2024_01_05               folder=2024_01_05: is text, which needs quotes here: 'folder="TEXT"'.
resume=true                     resume=true: is text, which needs quotes here
init_from=None                  init_from=None: for no value write init_from=null.
sample.prompt=${HOME}           Interpolation key 'HOME' not found. For a $ and a brace as text, type \\${.
"""
RULES = """
model.heads=3                   model.heads=3 does not divide model.width=128.
model.kv_heads=3                model.kv_heads=3 does not divide model.heads=4.
model.positions=rotary model.width=12                         needs an even head width; model.width / model.heads is 3.
train.batch_size=10 train.accumulation=4                      train.batch_size=10 can't be cut into equal micro-batches by
norm.placement=inside model.block=parallel                    norm.placement=inside is for sequential blocks.
model.residual_scale=deepnorm   model.residual_scale=deepnorm is for norms after the add; here norm.placement=pre.
norm.kind=derf model.qk_norm=true                             model.qk_norm=true has no derf for queries and keys.
norm.alpha=1                    norm.alpha is read only with norm.kind=dyt or derf; here norm.kind=layernorm.
model.qk_norm_kind=rmsnorm      model.qk_norm_kind is read only with model.qk_norm=true; here model.qk_norm=false.
loss.impl=torch loss.chunks=2   loss.chunks is read only with loss.impl=fused; here loss.impl=torch.
norm.impl=liger norm.kind=dyt   norm.impl=liger has no norm.kind=dyt here, but norm.kind=layernorm or rmsnorm.
model.dropout=1                 model.dropout=1.0: must be at least 0 and less than 1.
optim.warmup_steps=20 train.steps=10                          optim.warmup_steps=20 is more than train.steps=10
optim.min_lr=1                  optim.min_lr=1 is more than optim.lr=0.004
train.compile_mode=fast         Use default, reduce-overhead,
train.compile_mode=max-autotune-no-cudagraphs     needs train.compile=true (for ablate.py ablate.compile=true)
train.compile=true train.compile_mode=max-autotune deterministic=true    Use one of them.
train.compile=true train.compile_mode=reduce-overhead                a single process on a CUDA device. Use another mode.
optim.lr=nan                    optim.lr=nan: must be finite.
seed=99999999999999999999       seed=99999999999999999999: must be at least 0 and less than 9223372036854775808.
data=text                       data.source=text needs data.files
data.files=[a.txt]              data.files is read only with data.source=text
data=text data.files=[a] data.streaming=true                  data.streaming is read only with data.source=hub
data.source=hub                 data.source=hub needs data.path
tokenizer.kind=pretrained       tokenizer.kind=pretrained needs tokenizer.pretrained
tokenizer.pretrained=a          tokenizer.pretrained is read only with tokenizer.kind=pretrained; here tokenizer.kind=bpe.
train.precision=fp16            train.precision=fp16 needs a CUDA device; this run is on cpu
parallel=ddp                    parallel=ddp needs several processes: torchrun --nproc-per-node=N
"""
CASES = [re.split(" {2,}", line) for line in (NAMES + TYPES + RULES).splitlines() if line]
GRAPHS = "train.compile=true train.compile_mode=reduce-overhead"
MACHINES = [
    ("", Machine("mps"), "needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch."),
    ("train.precision=bf16", Machine("cuda", bf16=False), "Use train.precision=fp16 or fp32."),
    (GRAPHS, Machine("cuda", ranks=2, by_torchrun=True), "makes CUDA graphs, which are for a single process"),
    (f"{GRAPHS} parallel=fsdp", Machine("cuda", by_torchrun=True), "has no effect with parallel=fsdp"),
    ("train.compile=true", Machine("cpu", compiler=False), "train.compile=true needs a C++ compiler on a CPU"),
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
    jobs = list(configs.jobs(["norm.impl=fused,torch", "seed=range(1,3)", "train.steps=5", "model=tiny"]))
    assert jobs == [[f"norm.impl={i}", f"seed={s}", "train.steps=5", "model=tiny"] for i in ("fused", "torch") for s in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m norm.impl=fused,toch", "expected one of [fused, torch, compiled"),  # before the first starts
        ("-m seed=1,2 model.heads=4,3", "(in the job device=cpu seed=1 model.heads=3)"),
        ("-m optim.lr=interval(0,1)", "Can only enumerate CHOICE and RANGE sweeps"),
        ("hydra.run.dir=a folder=b", "hydra.run.dir=a: the folder of a run has one name. Use folder=PATH."),
        ("-m --cfg job seed=1,2", "Leave out -m."),
        ("--cfg job norm.imp=x", "norm.imp: no such key."),
        ("folder=/dev/null/x", "/dev/null/x: no run can be kept there (Not a directory)."),
        (f"folder={'x' * 300}", "no run can be kept there (File name too long)."),
        ("job", "job: Hydra can't read this."),
        ("--help model=gtp2", "Did you mean gpt2?"),
        ("folder=a\udcff", "is not UTF-8 text."),
    ],
)
def test_a_mistake_of_the_command_line_ends_with_one_message_and_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    given = ["device=cpu", *arguments.split()]
    with pytest.raises(SystemExit, match="2"):
        command_line.check(given)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # for a developer, the traceback
    with pytest.raises(ConfigError):
        command_line.check(given)


def test_a_command_that_can_run_gives_the_keys_of_its_sweep():
    assert command_line.check(["-m", "train.steps=5", "seed=1,2", "norm.impl=fused,torch"]) == {"seed", "norm.impl"}
    assert command_line.check(["train.steps=5"]) == command_line.check(["--cfg", "job", "seed=3"]) == set()
