"""How a run ends, and the folder that it can't have."""

from types import SimpleNamespace

import pytest
import torch

from tests.runs import composed, no_space
from training.run import Start, open_run


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
