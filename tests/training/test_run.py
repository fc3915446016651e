"""A run's folder and what is in it."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import configs
from configs import ConfigError
from tests.runs import composed
from training.evaluation import Validation
from training.plot import read_metrics
from training.report import Summary, report
from training.resume import Start
from training.run import open_run
from training.storage import StorageError

CPU = torch.device("cpu")


@pytest.fixture
def cfg():
    return composed(["logging.wandb=disabled"])


def test_no_two_runs_share_a_folder_and_the_one_that_gets_another_says_so(cfg, tmp_path, capsys):
    for name in ("run", "run_2", "run_3"):
        with open_run(Start(cfg, tmp_path / "run"), CPU) as run:
            assert run.folder == tmp_path / name
        said = f"{tmp_path}/run has another run already, so this one is kept in {tmp_path}/{name}.\n"
        assert capsys.readouterr().out == (said if name != "run" else "")


def test_config_and_environment_are_kept_and_metrics_are_lines_of_json_without_what_is_no_number(cfg, tmp_path):
    with open_run(Start(cfg, tmp_path / "run"), CPU) as run:
        run.log(10, {"train/loss": 2.0, "perf/mfu": None, "train/grad_norm": float("nan"), "perf/peak_gb": float("inf")})
        run.log(20, {"train/loss": 1.0})
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "tra')  # torn
    assert read_metrics(run.folder / "metrics.jsonl") == [{"step": 10, "train/loss": 2.0}, {"step": 20, "train/loss": 1.0}]
    assert configs.from_dict(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())) == cfg
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["versions"]["torch"] in torch.__version__ and facts["gpu"] is None
    assert {"command", "git", "python", "cuda", "threads"} <= facts.keys()


@pytest.mark.parametrize("lines", [1, 2])
def test_the_end_of_a_run_names_its_picture_only_if_one_was_drawn(cfg, tmp_path, lines):
    run = tmp_path / "run"
    with open_run(Start(cfg, run), CPU) as opened:
        opened.start({}, tokenizer="{}", train_bytes_per_token=1.0, val_bytes_per_token=1.0)
        for step in range(lines):
            opened.log(step + 1, {"train/loss": 2.0 - step})
    text = report(Summary(run, Validation(1.0, 1.0), Validation(1.0, 1.0), None, ""))
    assert (run / "loss.png").is_file() == (f"loss curve  {run}/loss.png" in text) == ("loss curve" in text) == (lines > 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (ValueError("x"), 1), (SystemExit(130), 130), (SystemExit(143), 143), (KeyboardInterrupt(), 130)],
)
def test_wandb_is_told_how_the_run_ended_though_its_picture_fails(cfg, tmp_path, capsys, error, code):
    codes = []

    def fails():
        raise OSError("disk full")

    raised = None
    try:
        with open_run(Start(cfg, tmp_path / "run"), CPU) as run:
            run.tracker, run.plot = SimpleNamespace(finish=codes.append), fails
            if error:
                raise error
    except BaseException as caught:
        raised = caught
    assert raised is error and codes == [code]
    assert "no plot: OSError: disk full" in capsys.readouterr().out


def test_a_folder_that_can_not_be_made_or_written_is_refused_by_name(cfg, tmp_path, monkeypatch):
    def opened(folder):
        with open_run(Start(cfg, folder), CPU) as run:
            (run.folder / "metrics.jsonl").mkdir()
            run.log(1, {"train/loss": 1.0})

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(StorageError, match=r"metrics\.jsonl can't be written: Is a directory"):
        opened(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"file.*(Choose another folder|folder=PATH)"):
            opened(folder)
    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ConfigError, match="a: a run can't be kept there: Permission denied"):
        opened(tmp_path / "a")
