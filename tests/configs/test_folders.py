"""How folders of runs and of a sweep's jobs are called, and whose choice they are."""

import pytest

import configs
from configs import command_line
from configs.machine import Machine

CPU = Machine(device="cpu")


def test_a_folder_name_holds_only_what_a_file_name_may():
    overrides = ["data.files=[a/b.txt,c d]", "norm.impl=torch", "logging.name=" + "x" * 300]

    name = command_line._job_folder(3, overrides, swept={"data.files", "norm.impl", "logging.name"})

    assert name.startswith("3_data.files-a-b.txt-c-d-_norm.impl-torch")
    assert "/" not in name and len(name) <= 120


def test_a_job_is_named_by_what_was_swept_alone():
    swept = command_line._swept(["-m", "model.dropout=0,0.1", "train.steps=5", "seed=range(1,3)", "data.files=[a,b]"])

    assert swept == {"model.dropout", "seed"}
    overrides = ["model.dropout=0.1", "train.steps=5", "seed=2", "data.files=[a,b]"]
    assert command_line._job_folder(1, overrides, swept) == "1_model.dropout-0.1_seed-2"
    assert command_line._job_folder(0, ["train.steps=5"], set()) == "0"


@pytest.mark.parametrize(
    ("name", "resume", "folder"),
    [
        (None, "never", "tinystories_gpt2_torch"),
        (None, "auto", "tinystories_gpt2_torch"),
        ("mine", "never", "mine"),
        (None, "runs/2026-01-02_03-04-05_shakespeare_tiny_fused", "resumed_shakespeare_tiny_fused"),
        (None, "runs/2026-01-02_03-04-05_resumed_mine/best", "resumed_mine"),
        (None, "runs/2026-01-02_03-04-05_mine/checkpoints/step_00000200", "resumed_mine"),
        ("again", "runs/2026-01-02_03-04-05_mine", "again"),
    ],
)
def test_a_run_is_named_by_what_it_trains(name, resume, folder):
    assert command_line._folder_name(name, resume, "tinystories", "gpt2", "torch") == folder


def test_a_fixed_folder_is_one_that_the_command_names():
    cfg, named = configs.load(on=CPU), configs.load(["folder=runs/mine"], on=CPU)

    assert not command_line.chooses_folder(cfg, ["hydra.job.chdir=false"])
    assert command_line.chooses_folder(named, [])
    assert command_line.chooses_folder(cfg, ["hydra.run.dir=runs/mine"])
    assert command_line.chooses_folder(cfg, ["hydra.sweep.dir=runs/mine"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hydra.run.dir=a", "folder=b"], "error: hydra.run.dir=a and folder=b both name the run's folder. Leave one.\n"),
        (["hydra.run.dir=/proc/mine"], "error: a run can't be kept in /proc/mine: "),
        (["hydra.sweep.dir='/dev/null/x y'", "seed=1,2", "-m"], "error: a run can't be kept in /dev/null/x y: "),
    ],
)
def test_a_folder_of_hydras_keys_is_checked_as_one_of_folder(arguments, says, capsys):
    with pytest.raises(SystemExit) as end:
        command_line.check(["device=cpu", *arguments])

    assert end.value.code == command_line.EXIT_CODE
    assert capsys.readouterr().err.startswith(says)
