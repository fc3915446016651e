"""Names of run folders, what --help says of the keys, and the commands of a W&B sweep."""

import re

import pytest
from wandb.sdk.launch.sweeps import utils as sweeps

import configs
from configs import ConfigError, command_line, keys
from tests.runs import CPU


@pytest.mark.parametrize(
    ("name", "resume", "folder"),
    [
        (None, "auto", "tinystories_gpt2_torch"),
        ("a/b c", "runs/2026-01-02_03-04-05_mine", "a-b-c"),
        (None, "runs/2026-01-02_03-04-05_resumed_mine/best", "resumed_mine"),
        (None, "runs/2026-01-02_03-04-05_mine/checkpoints/step_00000200", "resumed_mine"),
    ],
)
def test_a_run_is_named_by_what_it_trains(name, resume, folder):
    cfg = configs.from_dict({"data": {"name": "tinystories"}, "norm": {"impl": "torch"}})
    cfg.logging.name, cfg.resume = name, resume
    assert command_line.run_name(cfg, "gpt2") == folder


def test_help_has_every_key_with_its_value_in_a_plain_run_and_its_meaning_and_its_choices():
    plain = configs.compose_only([])
    text = command_line.describe_keys(plain)
    given = dict(re.findall(r"^  ([\w.]+)=(.*?)(?:  |$)", text, re.MULTILINE))
    for name, key in keys.schema().items():
        meaning = key.metadata["meaning"]
        assert meaning and re.search(rf"^  {re.escape(name)}=.* {re.escape(meaning)}$", text, re.MULTILINE)
        for choice, meaning in keys.choices(key).items():
            assert meaning and re.search(rf"^ {{20,}}{choice} +{re.escape(meaning)}$", text, re.MULTILINE)
    typed = [f"{key}={value}" for key, value in given.items() if key != "sample.prompt"]
    assert float(given["optim.lr"]) == plain.optim.lr and configs.compose_only(typed) == plain  # each as it is typed


def test_a_job_of_the_sweep_in_configs_is_a_valid_run_of_train_py():
    """W&B's own code makes the command of wandb_sweep.yaml, offline."""
    sweep = sweeps.load_sweep_config(str(keys.FOLDER / "wandb_sweep.yaml"))
    args = {key: {"value": of["values"][-1]} for key, of in sweep["parameters"].items()}
    given = sweeps.create_sweep_command_args({"args": args})
    given |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
    chunks = sweeps.create_sweep_command(list(sweep["command"]))  # as wandb's agent fills them in:
    command = [part for chunk in chunks for part in (given[chunk[2:-1]] if chunk.startswith("${") else [chunk])]
    assert command[:3] == ["/usr/bin/env", "python", "train.py"]
    cfg = configs.load(command[3:], on=CPU)
    assert (cfg.norm.impl, cfg.norm.kind, cfg.seed, cfg.logging.wandb) == ("fused", "rmsnorm", 3, "online")
    assert sweep["metric"]["name"] == "val/bits_per_byte"  # which test_train.py finds in a run's metrics


def test_a_sweep_is_every_combination_each_with_its_config_and_its_folder():
    given = ["norm.impl=fused,torch", "-m", "seed=range(1,3)", "data.files=[a/b c]", "folder=a/b", "model=tiny", "device=cpu"]
    jobs = command_line.read(["data=text", *given])
    assert [(job.cfg.norm.impl, job.cfg.seed) for job in jobs] == [("fused", 1), ("fused", 2), ("torch", 1), ("torch", 2)]
    assert [str(job.folder) for job in jobs][1:3] == ["a/b/1_norm.impl-fused_seed-2", "a/b/2_norm.impl-torch_seed-1"]
    [first, _] = command_line.read(["-m", "logging.name=a/b,'c d'", "device=cpu"])
    assert first.folder.name == "0_logging.name-a-b"
    [alone] = command_line.read(["device=cpu", "experiment=shakespeare_char", "norm.impl=torch"])
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_shakespeare_nanogpt_char_torch", str(alone.folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m norm.impl=fused,toch", "expected one of [fused, torch, compiled"),  # before the first starts
        ("-m seed=1,2 model.heads=4,3", "(in the job device=cpu seed=1 model.heads=3)"),
        ("hydra.run.dir=a", "hydra.run.dir: no such key."),
        ("--cfg job seed=1,2", "To sweep over it, add --multirun"),
        ("folder=a\udcff", "Hydra can't read this."),
    ],
)
def test_a_mistake_of_the_command_line_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        command_line.read(["device=cpu", *arguments.split()])
