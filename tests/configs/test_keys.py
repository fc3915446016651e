"""What --help says of the keys, and the commands of a W&B sweep."""

import re

from wandb.sdk.launch.sweeps import utils as sweeps

import ablation.config
import configs
from configs import keys
from tests.runs import CPU


def test_help_has_every_key_with_its_value_in_a_plain_run_and_its_meaning_and_its_choices():
    plain = configs.compose_only([], configs.Config)
    text = keys.describe(plain)
    given = dict(re.findall(r"^  ([\w.]+)=(.*?)(?:  |$)", text, re.MULTILINE))
    for name, key in keys.schema().items():
        meaning = key.metadata["meaning"]
        assert meaning and re.search(rf"^  {re.escape(name)}=.* {re.escape(meaning)}( \(.*\))?$", text, re.MULTILINE)
        for choice, meaning in keys.choices(key).items():
            assert meaning and re.search(rf"^ {{20,}}{choice} +{re.escape(meaning)}$", text, re.MULTILINE)
    assert re.search(
        r"^  ablate\.cycles=12 .* \(at least 6\)$", keys.describe(ablation.config.Config(), "ablate"), re.MULTILINE
    )
    typed = [f"{key}={value}" for key, value in given.items() if key != "sample.prompt"]
    assert (
        float(given["optim.lr"]) == plain.optim.lr and configs.compose_only(typed, configs.Config) == plain
    )  # each as it is typed


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
