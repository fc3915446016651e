"""configs/wandb_sweep.yaml: what a W&B agent makes of it is a command that train.py takes. Offline, with W&B's own code."""

import itertools

import pytest
from wandb.sdk.launch.sweeps import utils as sweeps

import configs
from configs import keys
from configs.machine import Machine
from tests.runs import ROOT

SWEEP = sweeps.load_sweep_config(str(keys.FOLDER / "wandb_sweep.yaml"))
VALUES = {key: of["values"] for key, of in SWEEP["parameters"].items()}
JOBS = [dict(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def command(job):
    """As wandb.wandb_agent.Agent._command_run writes it."""
    given = sweeps.create_sweep_command_args({"args": {key: {"value": value} for key, value in job.items()}})
    given |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [SWEEP["program"]]}
    chunks = sweeps.create_sweep_command(list(SWEEP["command"]))
    return [part for chunk in chunks for part in (given[chunk[2:-1]] if chunk.startswith("${") else [chunk])]


def test_it_covers_both_implementations_of_both_kinds_over_three_seeds():
    assert len(JOBS) == 12 and SWEEP["method"] == "grid"
    assert VALUES.keys() == {"norm.impl", "norm.kind", "seed"}
    assert (ROOT / SWEEP["program"]).is_file()


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, job.values())))
def test_the_command_of_each_job_is_a_valid_run_with_its_values(job):
    env, interpreter, program, *overrides = command(job)
    assert (env, interpreter, program) == ("/usr/bin/env", "python", "train.py")
    cfg = configs.load(overrides, on=Machine("cpu"))
    assert {"norm.impl": cfg.norm.impl, "norm.kind": cfg.norm.kind, "seed": cfg.seed} == job
    assert cfg.logging.wandb == "online"


def test_its_metric_is_one_that_runs_log():
    logged = (ROOT / "train.py").read_text(encoding="utf-8")
    assert f'"{SWEEP["metric"]["name"]}"' in logged
