"""Hydra's command line: its options, what --help says of the keys, groups of a user, and the commands of a W&B sweep."""

import re

import pytest
from wandb.sdk.launch.sweeps import utils as sweeps

import configs
import train
from configs import keys
from tests.runs import CPU


@pytest.fixture
def ran(tmp_path, monkeypatch, capsys):
    """ran(command, code): what `train.py command` prints where it ends with this code and leaves nothing."""
    monkeypatch.chdir(tmp_path)

    def ran(command, code=0):
        assert train.main(command if isinstance(command, list) else command.split()) == code
        assert not [path for path in tmp_path.iterdir() if path.name != "own"]
        out, err = capsys.readouterr()
        return err if code else out

    return ran


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--info searchpath", "configs"),
        ("--info defaults-tree model=gpt2", "model: gpt2"),
        ("--cfg hydra", "chdir: false"),
        ("--cfg job --resolve model=gpt2 norm.kind=rmsnorm", "kind: rmsnorm"),
        ("--cfg job --package norm", "impl: fused"),
        ("--hydra-help", "--config-dir"),
        ("--shell-completion query=bash", ""),
    ],
)
def test_hydras_options_do_what_its_documentation_says(ran, command, said, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "train.py norm.impl=t")
    monkeypatch.setenv("COMP_POINT", "20")
    assert said in ran(command)


def test_a_user_has_groups_of_an_own_folder(ran, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    recipe = "# @package _global_\ndefaults:\n  - override /model: gpt2\ntrain:\n  steps: 77\n"
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(recipe)
    said = ran(f"--config-dir {tmp_path}/own experiment=mine --cfg job")
    assert "steps: 77" in said and "layers: 12" in said
    assert "experiment=mien: no such option. Did you mean mine?" in ran(f"-cd {tmp_path}/own experiment=mien", code=2)


def test_help_has_every_key_with_its_value_in_a_plain_run_and_its_meaning_and_its_choices():
    plain = configs.compose_only([])
    text = keys.describe(plain)
    given = dict(re.findall(r"^  ([\w.]+)=(.*?)(?:  |$)", text, re.MULTILINE))
    for name, key in keys.schema().items():
        meaning = key.metadata["meaning"]
        assert meaning and re.search(rf"^  {re.escape(name)}=.* {re.escape(meaning)}$", text, re.MULTILINE)
        for choice, meaning in keys.choices(key).items():
            assert meaning and re.search(rf"^ {{20,}}{choice} +{re.escape(meaning)}$", text, re.MULTILINE)
    typed = [f"{key}={value}" for key, value in given.items() if key not in ("sample.prompt",)]
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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("-m norm.impl=fused,toch", "expected one of [fused, torch, compiled"),  # before the first starts
        ("seed=1,2 -m model.heads=4,3", "(in the job seed=1 model.heads=3 device=cpu)"),  # options may stand anywhere
        ("-m norm.kind=glob(*)", "norm.kind=glob(*): gives no values to sweep. List them: norm.kind=A,B."),
        ("-m optim.momentum=0.8,0.9", "optim.momentum is read only with optim.kind=muon"),
        ("hydra.run.dri=a", "hydra.run.dri"),
        ("seed=1,2", "To sweep over it, add --multirun"),
        ("+norm.imp=torch", "norm.imp: no such key. Did you mean norm.impl?"),
        ("+foo=1", "foo: no such key."),
        ("ablate.cycles=9", "ablate.cycles is read only by ablate.py"),
        ("study=first", "study"),
        ("--info --cfg job", "Only one of --run, --multirun, --cfg, --info"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_message_before_anything_starts(ran, command, message):
    said = ran([*command.split(), "device=cpu"], code=2)
    assert said.startswith("error: ") and message in said


def test_a_key_of_one_job_of_a_sweep_may_do_nothing_in_another(monkeypatch):
    checked = []
    monkeypatch.setattr("training.command.check", lambda jobs, _: checked.extend(jobs) or (_ for _ in ()).throw(SystemExit(7)))
    assert train.main(["-m", "norm.impl=fused,torch", "seed=range(1,3)", "device=cpu"]) == 7
    assert [job[:2] for job in checked] == [[f"norm.impl={impl}", f"seed={n}"] for impl in ("fused", "torch") for n in (1, 2)]
