"""How a run ends, and the folder that it can't have."""

from types import SimpleNamespace

import pytest
import torch

from configs import ConfigError
from tests.runs import composed, no_space
from training.run import Start, open_run
from training.storage import StorageError


def opened(folder):
    return open_run(Start(composed(["logging.wandb=disabled"]), folder), torch.device("cpu"))


@pytest.mark.parametrize(("error", "code"), [(ValueError("x"), 1), (SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_wandb_is_told_how_the_run_ended_though_its_picture_fails(tmp_path, monkeypatch, capsys, error, code):
    codes: list[int] = []
    monkeypatch.setattr("training.run.loss_curve", no_space)
    with pytest.raises(type(error)), opened(tmp_path / "run") as run:
        run.tracker = SimpleNamespace(finish=codes.append)
        raise error
    assert codes == [code] and "no plot: OSError: " in capsys.readouterr().out


def test_a_folder_that_can_not_be_made_or_written_is_refused_by_name(tmp_path):
    with pytest.raises(StorageError, match=r"metrics\.jsonl can't be written: Is a directory"), opened(tmp_path / "run") as run:
        (run.folder / "metrics.jsonl").mkdir()
        run.log(1, {"train/loss": 1.0})
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"file/run: Not a directory. Choose another folder"),
        opened(tmp_path / "file" / "run"),
    ):
        pass
