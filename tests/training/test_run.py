"""A run's folder and what is in it."""

from types import SimpleNamespace

import pytest
import torch

from configs import ConfigError
from tests.runs import composed, no_space
from training.resume import Start
from training.run import open_run
from training.storage import StorageError

CPU = torch.device("cpu")
OFF = ["logging.wandb=disabled"]


@pytest.mark.parametrize(("error", "code"), [(ValueError("x"), 1), (SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_wandb_is_told_how_the_run_ended_though_its_picture_fails(tmp_path, monkeypatch, capsys, error, code):
    codes: list[int] = []
    monkeypatch.setattr("training.run.loss_curve", no_space)
    with pytest.raises(type(error)), open_run(Start(composed(OFF), tmp_path / "run"), CPU) as run:
        run.tracker = SimpleNamespace(finish=codes.append, log=lambda *_: None)
        run.log(1, {})
        raise error
    assert codes == [code] and "no plot: OSError: " in capsys.readouterr().out


def test_a_folder_that_can_not_be_made_or_written_is_refused_by_name(tmp_path):
    def opened(folder):
        with open_run(Start(composed(OFF), folder), CPU) as run:
            (run.folder / "metrics.jsonl").mkdir()
            run.log(1, {"train/loss": 1.0})

    with pytest.raises(StorageError, match=r"metrics\.jsonl can't be written: Is a directory"):
        opened(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"file.*(Choose another folder|folder=PATH)"):
            opened(folder)
