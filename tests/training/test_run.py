"""How a run ends, and the folder that it can't have."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs import ConfigError
from tests.ranks import on_ranks
from tests.runs import composed, no_space
from training.run import Start, check_shared, open_run


def opened(folder):
    return open_run(Start(composed(["logging.wandb=disabled"]), folder), torch.device("cpu"))


@pytest.mark.parametrize(("error", "code"), [(ValueError("x"), 1), (SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_wandb_is_told_how_the_run_ended_though_its_picture_fails(tmp_path, monkeypatch, capsys, error, code):
    codes: list[int] = []
    monkeypatch.setattr("training.plot.loss_curve", no_space)
    with pytest.raises(type(error)), opened(tmp_path / "run") as run:
        run.tracker = SimpleNamespace(finish=codes.append)
        raise error
    assert codes == [code] and "no plot: OSError: " in capsys.readouterr().out


def _check(world, on, folder, shared):
    home = folder / ("both" if shared else f"node{world.rank}")
    (home / "run").mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    said = ""
    try:
        check_shared(Path("run"), world, patience_s=0.3)
    except ConfigError as error:
        said = str(error)
    return {"error": said, "left": [path.name for path in Path("run").iterdir()]}


@pytest.mark.parametrize("shared", [True, False])
def test_a_folder_that_the_ranks_do_not_share_is_seen_at_the_start_by_all_of_them(tmp_path, shared):
    told = on_ranks(2, _check, tmp_path, shared)
    assert all(("folder=run: rank 1 on " in rank["error"]) == (not shared) for rank in told), told
    assert not told[0]["left"]
