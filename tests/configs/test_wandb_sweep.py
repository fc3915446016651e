"""configs/wandb_sweep.yaml: W&B's own code makes commands of it, offline, and train.py takes them."""

import itertools

from wandb.sdk.launch.sweeps import utils as sweeps

import configs
from configs import keys
from tests.runs import CPU, ROOT


def test_each_job_is_a_valid_run_of_train_py_with_its_values_and_with_the_metric_that_runs_log():
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
    logged = [path.read_text(encoding="utf-8") for path in (ROOT / "train.py", *(ROOT / "training").glob("*.py"))]
    assert any(f'"{sweep["metric"]["name"]}"' in text for text in logged)
