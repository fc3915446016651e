"""Names of run folders, what --help says of the keys, and the commands of a W&B sweep."""

import itertools
import re

import pytest
from omegaconf import OmegaConf
from wandb.sdk.launch.sweeps import utils as sweeps

import configs
from configs import command_line, keys
from tests.runs import CPU


@pytest.mark.parametrize(
    ("name", "resume", "folder"),
    [
        (None, "auto", "tinystories_gpt2_torch"),
        ("mine", "never", "mine"),
        ("a/b c", "runs/2026-01-02_03-04-05_mine", "a-b-c"),
        (None, "runs/2026-01-02_03-04-05_shakespeare_tiny_fused", "resumed_shakespeare_tiny_fused"),
        (None, "runs/2026-01-02_03-04-05_resumed_mine/best", "resumed_mine"),
        (None, "runs/2026-01-02_03-04-05_mine/checkpoints/step_00000200", "resumed_mine"),
    ],
)
def test_a_run_is_named_by_what_it_trains(name, resume, folder):
    cfg = configs.to_dict(configs.load(["data=tinystories", "norm.impl=torch"], on=CPU))
    cfg = OmegaConf.merge(OmegaConf.structured(configs.Config), cfg, {"logging": {"name": name}, "resume": resume})
    OmegaConf.update(cfg, "hydra.runtime.choices.model", "gpt2", force_add=True)
    assert command_line.run_name(cfg) == folder


def test_a_run_of_a_sweep_is_named_by_what_was_swept_in_letters_of_a_file_name():
    overrides = ["model.dropout=0.1", "train.steps=5", "data.files=[a/b.txt,c d]"]
    assert command_line.job_name(1, overrides, {"model.dropout", "data.files"}) == "1_model.dropout-0.1_data.files-a-b.txt-c-d-"
    assert command_line.job_name(0, overrides, set()) == "0"
    assert len(command_line.job_name(0, ["logging.name=" + "x" * 300], {"logging.name"})) == 120


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


def test_each_job_of_the_sweep_in_configs_is_a_valid_run_of_train_py():
    """W&B's own code makes commands of wandb_sweep.yaml, offline."""
    sweep = sweeps.load_sweep_config(str(keys.FOLDER / "wandb_sweep.yaml"))
    values = {key: of["values"] for key, of in sweep["parameters"].items()}
    assert sweep["method"] == "grid" and values.keys() == {"norm.impl", "norm.kind", "seed"}
    for job in itertools.product(*values.values()):
        args = {key: {"value": value} for key, value in zip(values, job, strict=True)}
        given = sweeps.create_sweep_command_args({"args": args})
        given |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [sweep["program"]]}
        chunks = sweeps.create_sweep_command(list(sweep["command"]))  # as wandb's agent fills them in:
        command = [part for chunk in chunks for part in (given[chunk[2:-1]] if chunk.startswith("${") else [chunk])]
        assert command[:3] == ["/usr/bin/env", "python", "train.py"]
        cfg = configs.load(command[3:], on=CPU)
        assert (cfg.norm.impl, cfg.norm.kind, cfg.seed, cfg.logging.wandb) == (*job, "online")
    assert sweep["metric"]["name"] == "val/bits_per_byte"  # which test_train.py finds in a run's metrics
