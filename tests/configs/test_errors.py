"""What a user reads after a mistake: the key, what was given, what is accepted, what to do."""

import re
from pathlib import Path

import pytest
import torch

import configs
from configs import ConfigError, command_line, machine
from configs.machine import Machine
from configs.schema import Device, NormKind

CPU = Machine(device="cpu")

UNKNOWN = {
    "norm.imp=torch": "norm.imp: no such key. Did you mean norm.impl? Keys of norm: impl, kind, eps, dropout_masks.",
    "+norm.fusd=1": "norm.fusd: no such key. Did you mean norm.impl=fused?",
    "++norm.fusd=1": "norm.fusd: no such key. Did you mean norm.impl=fused?",
    "+norm.imp=torch": "norm.imp: no such key. Did you mean norm.impl?",
    "steps=10": "steps: no such key. Did you mean train.steps?",
    "lr=1": "lr: no such key. Did you mean optim.lr?",
    "optim.learning_rate=1": "optim.learning_rate: no such key.",
    "modl=gpt2": "modl: no such key. Did you mean model?",
    "tran.steps=3": "tran.steps: no such key. Did you mean train.steps?",
    "model=gtp2": "model=gtp2: no such option. Did you mean model=gpt2?",
    "+experiment=shakespear": "drop the +",
    "experiment=shakespeare_chr": "Did you mean experiment=shakespeare_char?",
    "optim={lrr: 1}": "optim.lrr: no such key. Did you mean optim.lr?",
    "ablate.cycle=3": "Did you mean ablate.cycles? Keys of ablate: cycles, ",
    "+train.steps=3": "+train.steps=3: drop the +, the key exists already.",
    "~norm.impl": "no key can be taken away",
    "train.steps": "train.steps: an override is written key=value",
    "optim.lr=interval(0,1)": "optim.lr=interval(0,1): a sweep needs its values, one after the other: optim.lr=A,B",
    "model=glob(*)": "model=glob(*): a sweep needs its values, one after the other: model=A,B",
    "seed=1,": "seed=1,: an override is written key=value",
    "sample.prompt=Ω": "sample.prompt=Ω: This value needs quotes, and the shell some around them: 'sample.prompt=\"Ω\"'.",
    "data.files=[~/notes/*.txt]": "Hydra has a use of its own for an unquoted ~ (it takes keys away). This value needs quotes, "
    "and the shell some around them: 'data.files=[\"~/notes/*.txt\"]'.",
    "data.files=[a.txt,~/b]": "the shell some around them: 'data.files=[a.txt,\"~/b\"]'.",
    "folder=~/runs": "This value needs quotes, and the shell some around them: 'folder=\"~/runs\"'.",
}

TYPES = {
    "norm.impl=fusd": "norm.impl=fusd: must be one of fused, torch. Did you mean fused?",
    "norm.kind=x": f"norm.kind=x: must be one of {', '.join(NormKind)}.",
    "train.precision=fp8": "must be one of auto, bf16, fp16, fp32.",
    "train.steps=abc": "train.steps=abc: must be a whole number.",
    "train.steps=1.5": "train.steps=1.5: must be a whole number.",
    "train.steps=null": "train.steps: must be a whole number.",
    "optim.lr=fast": "optim.lr=fast: must be a number.",
    "train.compile=maybe": "train.compile=maybe: must be true or false.",
    "model.kv_heads=two": "model.kv_heads=two: must be a whole number or null.",
    "logging.tags=a": "logging.tags=a: must be a list [a,b] or null. Use logging.tags=[a].",
    "data.files=README.md": "data.files=README.md: must be a list [a,b]. Use data.files=[README.md].",
    "optim.lr=???": "optim.lr=???: must be a number.",
    "optim={lr: ???}": "optim.lr=???: must be a number.",
    "optim=null": "optim=null: optim is a group of keys. Set one of them: optim.lr, ",
    "optim=3": "optim=3: optim is a group of keys. Set one of them: optim.lr, ",
    "model=null": "model=null: no such option. Options of model: gpt2, ",
    "experiment=null": "experiment=null: no such option.",
    "data=[text,shakespeare]": "data takes one option. Several make several runs: -m data=A,B.",
    "model=[tiny,gpt2]": "model takes one option. Several make several runs: -m model=A,B.",
    "logging.name=${oc.env:NO_SUCH_VARIABLE}": "Environment variable 'NO_SUCH_VARIABLE' not found",
}

RULES = {
    "model.heads=3": "model.heads=3 does not divide model.width=128. Use model.heads=2 or model.width=120.",
    "model.heads=60": "Use model.heads=16 or model.width=480.",  # and not 64 heads of 2 columns
    "model.heads=5 model.width=12": "Use model.heads=4 or model.width=40.",  # a width that has no heads of 8
    "model.heads=4 model.kv_heads=3": "model.kv_heads=3 does not divide model.heads=4. Use model.kv_heads=2",
    "model.positions=rotary model.width=12 model.heads=4": "even head width or model.positions=learned",
    "model.vocab_size=100 tokenizer.vocab_size=512": "model.vocab_size=100 is smaller than tokenizer.vocab_size=512. Use",
    "train.batch_size=10 train.accumulation=4": "train.batch_size=10 can't be cut into equal micro-batches by "
    "train.accumulation=4. Use train.batch_size=12",
    "model.dropout=1": r"model.dropout=1.0: must be in [0, 1).",
    "model.dropout=-0.1": r"model.dropout=-0.1: must be in [0, 1).",
    "model.attention_dropout=1.5": r"model.attention_dropout=1.5: must be in [0, 1).",
    "model.drop_path=1": r"model.drop_path=1.0: must be in [0, 1).",
    "optim.warmup_steps=20 train.steps=10": "optim.warmup_steps=20 is more than train.steps=10",
    "optim.lr=1e-3 optim.min_lr=1e-2": "optim.min_lr=0.01 is more than optim.lr=0.001",
    "train.compile_mode=fast": "not a mode of torch.compile's that can be used here. Use default, reduce-overhead,",
    "train.compile_mode=max-autotune-no-cudagraphs": "with it; for ablate.py that is ablate.compile=true",
    "train.compile=true train.compile_mode=max-autotune-no-cudagraphs deterministic=true": "Use one of them",
    "train.compile_mode=reduce-overhead train.compile=true": "train.compile_mode=reduce-overhead needs a CUDA device; this run",
    "optim.lr=0": "optim.lr=0.0: must be more than 0 and finite",
    "optim.lr=nan": "optim.lr=nan: must be more than 0 and finite",
    "optim.lr=inf": "optim.lr=inf: must be more than 0 and finite",
    "optim.beta2=1": "optim.beta2=1.0: must be in [0, 1).",
    "optim.decay_fraction=0": "optim.decay_fraction=0.0: must be in (0, 1].",
    f"seed={2**63}": f"seed={2**63}: must be at least 0 and less than 2**63.",
    "seed=99999999999999999999": "seed=99999999999999999999: must be at least 0",
    "seed=-1": "seed=-1: must be at least 0",
    "train.steps=0 optim.warmup_steps=0": "train.steps=0: must be at least 1",
    "train.batch_size=0": "train.batch_size=0: must be at least 1",
    "train.accumulation=0": "train.accumulation=0: must be at least 1",
    "eval.every=-1": "eval.every=-1: must be at least 0",
    "logging.every=0": "logging.every=0: must be at least 1",
    "sample.temperature=-1": "sample.temperature=-1.0: must be at least 0",
    "sample.top_k=0": "sample.top_k=0: must be at least 1",
    "sample.prompt=''": "sample.prompt is empty",
    "data.val_fraction=1": "data.val_fraction=1.0: must be in (0, 1).",
    "data=text": "data.source=text needs data.files",
    "data.files=[a.txt]": "data.files is read only with data.source=text",
    "data.path=a": "data.path is read only with data.source=hub",
    "data.source=hub": "data.source=hub needs data.path",
    "tokenizer.kind=pretrained": "tokenizer.kind=pretrained needs tokenizer.pretrained",
    "tokenizer.vocab_size=200": "Use at least 257",
    "logging.without_key=online": "logging.without_key=online",
    "train.precision=fp16": "train.precision=fp16 needs a CUDA device; this run is on cpu",
}

DEVICES = {
    "norm.impl=fused": (
        Machine(device="mps"),
        "norm.impl=fused needs Triton on cuda or TRITON_INTERPRET=1; this run is on mps. Use norm.impl=torch.",
    ),
    "norm.impl=fused seed=2": (Machine(device="cuda", triton=False), "Install triton, or use norm.impl=torch."),
    "train.precision=bf16": (Machine(device="cuda", bf16=False), "Use train.precision=fp16 or fp32."),
    "train.compile=true": (Machine(device="cpu", cpp_compiler=False), "train.compile=true needs a C++ compiler on the CPU"),
    "train.compile=true train.compile_mode=max-autotune train.accumulation=2": (
        Machine(device="cuda"),
        "(train.accumulation=2)",
    ),
    "train.compile=true train.compile_mode=reduce-overhead": (
        Machine(device="cuda", gpus=2, ranks=2, by_torchrun=True),
        "train.compile_mode=reduce-overhead makes CUDA graphs, which are for a single process",
    ),
    "parallel=fsdp train.compile=true train.compile_mode=max-autotune-no-cudagraphs": (
        Machine(device="cuda", gpus=2, ranks=2, by_torchrun=True),
        "parallel=fsdp compiles part by part, in the default mode. Use train.compile_mode=default.",
    ),
    "train.compile_loss=true": (Machine(device="cpu", cpp_compiler=False), "train.compile_loss=true needs a C++ compiler"),
}


@pytest.mark.parametrize(("overrides", "message"), (UNKNOWN | TYPES | RULES).items())
def test_a_mistake_is_answered_with_key_value_and_remedy(overrides, message):
    parts = [overrides] if "{" in overrides else overrides.split()

    with pytest.raises(ConfigError) as error:
        configs.load(parts, on=CPU)

    assert message in str(error.value)


@pytest.mark.parametrize(("overrides", "case"), DEVICES.items())
def test_what_the_device_can_not_do_is_refused_before_the_start(overrides, case):
    on, message = case

    with pytest.raises(ConfigError) as error:
        configs.load(overrides.split(), on=on)

    assert message in str(error.value)


@pytest.mark.parametrize(
    ("capabilities", "bf16"),
    [
        ({"avx2": True, "avx512_bf16": False}, False),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({}, True),
    ],
)
def test_a_cpu_without_bf16_is_known_and_not_refused(capabilities, bf16, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)

    on = machine.inspect(Device.cpu)

    assert on.bf16 is bf16
    assert configs.load(["train.precision=bf16"], on=on).train.precision == "bf16"


def test_fused_norms_run_on_a_cpu():
    assert configs.load(["norm.impl=fused"], on=CPU).norm.impl == "fused"


def test_all_broken_rules_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        configs.load(["model.heads=3", "optim.lr=-1", "train.batch_size=3", "train.accumulation=2"], on=CPU)

    assert all(key in str(error.value) for key in ("model.heads=3", "optim.lr=-1", "train.batch_size=3"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lr=-1"], "optim.lr=-1.0: must be more than 0 and finite."),
        (["optim.lr=nan"], "optim.lr=nan: must be more than 0 and finite."),
        (["optim.min_lr=inf"], "optim.min_lr=inf: must be at least 0 and finite."),
        (["train.steps=-3"], "train.steps=-3: must be at least 1."),
        (["train.batch_size=-1", "train.accumulation=2"], "train.batch_size=-1: must be at least 1."),
        (["model.vocab_size=-1"], "model.vocab_size=-1: must be at least 1."),
    ],
)
def test_a_number_out_of_its_range_is_one_line_and_no_rule_about_what_it_would_mean_for_others(overrides, message):
    with pytest.raises(ConfigError) as error:
        configs.load(overrides, on=CPU)

    assert str(error.value) == message


@pytest.mark.parametrize(
    ("key", "program"), [("ablate.cycle", "ablate.py"), ("ablate.steps", "ablate.py"), ("eval.evry", "train.py")]
)
def test_an_unknown_key_refers_to_the_help_that_lists_it(key, program):
    with pytest.raises(ConfigError, match=rf"`python {program} --help` lists"):
        configs.load([f"{key}=3"], on=CPU)


def test_a_batch_must_divide_among_the_ranks():
    cfg = configs.load(["train.batch_size=12", "train.accumulation=2"], on=CPU)

    configs.rules.check(cfg, Machine("cpu", ranks=3))
    with pytest.raises(ConfigError, match=r"× 4 ranks.*train\.batch_size=16"):
        configs.rules.check(cfg, Machine("cpu", ranks=4))


@pytest.mark.parametrize(
    ("overrides", "machine", "message"),
    [
        (["parallel=ddp"], Machine("cpu"), r"parallel=ddp: this process is alone\. Start several with torchrun"),
        ([], Machine("mps", ranks=2, by_torchrun=True), r"device=mps: .* 2 ranks\. Use device=cpu"),
        ([], Machine("cuda", ranks=4, local_rank=2, gpus=2, by_torchrun=True), r"local rank 2, .* 2 GPUs.*--nproc-per-node=2"),
    ],
)
def test_ranks_that_can_not_work_are_refused(overrides, machine, message):
    with pytest.raises(ConfigError, match=message):
        configs.load([*overrides, "norm.impl=torch"], on=machine)


def test_one_rank_of_torchrun_may_ask_for_ddp():
    assert configs.load(["parallel=ddp"], on=Machine("cpu", by_torchrun=True)).parallel == "ddp"


def test_several_values_without_a_sweep_are_refused():
    with pytest.raises(ConfigError, match="add -m"):
        list(command_line.jobs(["norm.impl=fused,torch"], sweep=False))


def test_a_sweep_is_every_combination():
    jobs = list(command_line.jobs(["norm.impl=fused,torch", "seed=1,2", "train.steps=5"], sweep=True))

    assert sorted(jobs) == [
        [f"norm.impl={impl}", f"seed={seed}", "train.steps=5"] for impl in ("fused", "torch") for seed in (1, 2)
    ]


def test_the_last_job_of_a_sweep_is_checked_before_the_first_starts(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.check(["-m", "norm.impl=fused,toch", "seed=1,2"])

    assert end.value.code == 2
    assert "norm.impl=toch: must be one of fused, torch. Did you mean torch?" in capsys.readouterr().err


def test_a_mistake_ends_with_one_message_and_code_2(capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as end:
        command_line.check(["norm.impl=fusd"])

    assert end.value.code == 2
    assert capsys.readouterr().err == "error: norm.impl=fusd: must be one of fused, torch. Did you mean fused?\n"


def test_an_option_between_keys_is_answered_with_where_it_stands(capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as end:
        command_line.check(["train.steps=5", "-m", "seed=1,2"])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "error: seed=1,2: options such as -m stand before all of key=value, or behind, not between them.\n"
    )
    for arguments in (["-m", "train.steps=5", "seed=1,2"], ["train.steps=5", "seed=1,2", "-m"]):
        command_line.check(arguments)


@pytest.mark.parametrize("arguments", [["--train.steps=3"], ["--steps", "3"], ["norm.kind=rmsnorm", "-steps=3"]])
def test_settings_written_as_options_are_answered_with_how_they_are_written(arguments, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as end:
        command_line.check(arguments)
    assert end.value.code == 2
    assert re.fullmatch(r"error: -\S+: no such option\. Settings are written key=value, without .*\n", capsys.readouterr().err)


def test_a_developer_can_have_the_traceback(monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError):
        command_line.check(["norm.impl=fusd"])


@pytest.mark.parametrize(
    ("override", "message"),
    [("resume=", "resume is empty. Use never, auto, or "), ("init_from=", "init_from is empty. Use null, the path of a run")],
)
def test_a_run_to_go_on_with_or_to_begin_with_has_a_name(override, message, capsys, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as end:
        command_line.check([override])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_place_where_no_run_can_be_kept_is_refused_before_it_is_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        command_line.check([f"folder={tmp_path / 'file' / 'run'}"])
    assert stop.value.code == 2
    assert f"{tmp_path / 'file'} is no folder. Choose another place with folder=PATH" in capsys.readouterr().err

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path / "locked")  # as root, everything is writable
    with pytest.raises(SystemExit) as stop:
        command_line.check([f"folder={tmp_path / 'locked' / 'run'}"])
    assert stop.value.code == 2
    assert f"{tmp_path / 'locked'} is not writable" in capsys.readouterr().err
    assert list((tmp_path / "locked").iterdir()) == []

    long = "long" * 100
    with pytest.raises(SystemExit) as stop:
        command_line.check([f"folder={tmp_path / long}"])
    assert stop.value.code == 2
    assert re.search(rf"{long}: File name too long\. Use another folder=PATH", capsys.readouterr().err)
