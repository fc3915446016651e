"""A run's folder and what is in it."""

import errno
import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import yaml

import configs
from configs import ConfigError
from configs.machine import Machine
from configs.schema import WandbMode
from training.evaluation import Validation
from training.plot import read_metrics
from training.report import Summary, report
from training.resume import Start
from training.run import open_run
from training.storage import StorageError

CPU = torch.device("cpu")


@pytest.fixture
def cfg():
    return configs.load(["logging.wandb=disabled"], on=Machine("cpu"))


def test_no_two_runs_share_a_folder_and_the_one_that_gets_another_says_so(cfg, tmp_path, capsys):
    said = []
    for _ in range(3):
        with open_run(Start(cfg, tmp_path / "run"), CPU):
            pass
        said.append(capsys.readouterr().out)
    assert said[0] == ""
    assert said[2] == f"{tmp_path}/run has another run already, so this one is kept in {tmp_path}/run_3.\n"


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


@pytest.mark.parametrize("error", [None, ValueError("the real one")])
def test_a_plot_that_fails_closes_wandb_and_hides_no_error(cfg, tmp_path, capsys, error):
    codes = []

    class FakeTracker:
        finish = staticmethod(codes.append)

    def fails():
        raise OSError("disk full")

    raised = None
    try:
        with open_run(Start(cfg, tmp_path / "run"), CPU) as run:
            run.tracker, run.plot = FakeTracker(), fails
            if error:
                raise error
    except Exception as caught:
        raised = caught
    assert raised is error
    assert codes == [1 if error else 0]
    assert "no plot: OSError: disk full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (ValueError("x"), 1), (SystemExit(130), 130), (SystemExit(143), 143), (KeyboardInterrupt(), 130)],
)
def test_wandb_is_told_how_the_run_ended(cfg, tmp_path, error, code):
    codes = []

    class FakeTracker:
        log = log_image = lambda *_: None
        finish = staticmethod(codes.append)

    try:
        with open_run(Start(cfg, tmp_path / "run"), CPU) as run:
            run.tracker = FakeTracker()
            if error:
                raise error
    except BaseException as raised:
        assert raised is error
    assert codes == [code]


def test_a_folder_that_can_not_be_made_or_written_is_refused_by_name(cfg, tmp_path, monkeypatch):
    message = r"metrics\.jsonl can't be written: Is a directory"
    with pytest.raises(StorageError, match=message), open_run(Start(cfg, tmp_path / "run"), CPU) as run:
        (run.folder / "metrics.jsonl").mkdir()
        run.log(1, {"train/loss": 1.0})
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"file.*(Choose another folder|folder=PATH)"), open_run(Start(cfg, folder), CPU):
            pass

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with (
        pytest.raises(ConfigError, match="a run can't be kept there: Permission denied"),
        open_run(Start(cfg, tmp_path / "a"), CPU),
    ):
        pass


class Tracked:
    """Stands for training.tracking.Tracker, and keeps how it was made."""

    mode, note = WandbMode.offline, ""
    made: ClassVar[list[dict]] = []

    def __init__(self, *_, **how):
        self.made.append(how)

    def finish(self, exit_code): ...


def test_a_run_has_the_group_and_name_of_its_agents_sweep_and_the_config_still_wins(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr("training.run.Tracker", Tracked)
    monkeypatch.setattr("training.run.agent_job", lambda: ("sweep_s1", "norm.impl-fused_seed-2"))
    Tracked.made.clear()
    for group, name in ((None, None), ("mine", "best")):
        cfg.logging.group, cfg.logging.name = group, name
        with open_run(Start(cfg, tmp_path / "run"), CPU) as run:
            run.start({}, tokenizer="{}", train_bytes_per_token=1.0, val_bytes_per_token=1.0)
    assert [(how["group"], how["name"]) for how in Tracked.made] == [
        ("sweep_s1", "sweep_s1/norm.impl-fused_seed-2"),
        ("mine", "best"),
    ]


def test_several_runs_in_one_job_of_an_agent_are_refused(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr("training.run.agent_job", lambda: ("sweep_s1", "seed-2"))
    with (
        pytest.raises(configs.ConfigError, match="the job of a W&B agent is one run"),
        open_run(Start(cfg, tmp_path / "run"), CPU, group="2026_sweep") as run,
    ):
        run.start({}, tokenizer="{}", train_bytes_per_token=1.0, val_bytes_per_token=1.0)
