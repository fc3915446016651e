"""A run that goes on elsewhere: on another device, beside others, with a part of it gone."""

import shutil

import pytest

import configs
from ablate import main as ablate
from configs import ConfigError, command_line
from configs.machine import Machine
from configs.schema import Precision
from tests.resume.stops import AUTO, train_until
from tests.runs import train_here
from training import checkpoint, storage
from training.resume import settle


@pytest.fixture
def stopped(tiny, tmp_path):
    """The folder of a run that was stopped at step 16, and the command that goes on."""
    command = [*tiny, *AUTO, "train.precision=bf16"]
    train_until(16, command, tmp_path / "run")
    return tmp_path / "run", command


def test_auto_goes_on_in_the_precision_that_the_run_began_with(stopped, tiny):
    folder, _ = stopped
    cfg = configs.load([*tiny, *AUTO], on=Machine("cpu"))
    assert cfg.train.precision is Precision.auto  # which would be fp32 on this CPU
    assert settle(cfg, folder, [], chosen=True).cfg.train.precision is Precision.bf16
    cfg.resume = str(folder)
    found = settle(cfg, folder.with_name("new"), ["train.precision=auto"], chosen=False)
    assert found.cfg.train.precision is Precision.bf16 and found.in_place
    cfg.resume, cfg.train.precision = "auto", Precision.fp32
    with pytest.raises(ConfigError, match=r"train.precision=fp32: the checkpoint was made with train.precision=bf16"):
        settle(cfg, folder, [], chosen=True)


def test_a_link_to_a_checkpoint_that_was_deleted_is_explained_and_goes_when_the_run_goes_on(stopped, capfd):
    folder, command = stopped
    train_here([*command, "checkpoint.keep=9"], folder)
    storage.link(folder, "best", folder / "checkpoints" / storage.name(10))
    shutil.rmtree(folder / "checkpoints" / storage.name(10))
    with pytest.raises(ConfigError, match=r"best points to checkpoints/step_00000010, which is gone. Give the run"):
        checkpoint.read(folder / "best")
    assert storage.drop_dangling_link(folder, "best") and not (folder / "best").is_symlink()
    assert not storage.drop_dangling_link(folder, "last") and (folder / "last").is_dir()


def test_a_sweep_does_not_send_several_jobs_into_one_folder(stopped, capsys):
    folder, _ = stopped
    with pytest.raises(SystemExit) as refused:
        command_line.check(["-m", f"resume={folder}", "norm.impl=fused,torch"])
    assert refused.value.code == command_line.EXIT_CODE
    message = capsys.readouterr().err
    assert f"resume={folder}: several jobs of this sweep would go on in that folder" in message
    assert f"resume={folder}/last" in message
    command_line.check(["-m", f"resume={folder}/last", "norm.impl=fused,torch"])
    command_line.check(["-m", f"resume={folder}", "norm.impl=fused"])


def test_ablate_refuses_torchrun_and_says_it_once(monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ablate([]) == command_line.EXIT_CODE
    assert (
        "ablate.py is one process on one device, and each of 2 ranks would do all of its work anew" in capsys.readouterr().err
    )
    monkeypatch.setenv("RANK", "1")
    assert ablate([]) == command_line.EXIT_CODE
    assert capsys.readouterr().err == ""
