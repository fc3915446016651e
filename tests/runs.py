"""Small runs for tests: a corpus of one file, a model of two layers, and train.py as a user starts it."""

import copy
import errno
import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import torch
from safetensors.torch import load_file

import configs
from configs import Config
from configs.keys import GROUPS
from configs.machine import Machine
from configs.schema import ModelConfig, TrainConfig
from training import checkpoint
from training.distributed import ALONE, World
from training.precision import MixedPrecision
from training.run import open_run
from training.start import find_start
from training.storage import read_metrics

ROOT = Path(__file__).parent.parent
CPU = Machine("cpu")
WORDS = ["the", "king", "and", "queen", "of", "night", "are", "come", "to", "see", "what", "morning", "brings", "us"]


def corpus(folder: Path) -> list[str]:
    """Overrides for a text of 20 kB in `folder`, and a model that learns it on a CPU in seconds."""
    choose = random.Random(0)
    text = "\n".join(" ".join(choose.choices(WORDS, k=8)) for _ in range(500))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return [
        *("data=text", f"data.files=[{folder / 'text.txt'}]", f"data.cache_dir={folder / 'cache'}", "tokenizer=char"),
        *("model.layers=2", "model.heads=2", "model.width=32", "model.context=32"),
        *("train.steps=30", "train.batch_size=8", "optim.warmup_steps=3", "optim.lr=3e-3", "optim.min_lr=3e-4"),
        *("eval.every=10", "logging.every=5", "sample.tokens=10", "logging.wandb=disabled", "device=cpu"),
    ]


def config(**model) -> Config:
    """Of steps on two rows of 16 tokens, with these keys of the model; composed of no files."""
    sizes = {"layers": 2, "heads": 2, "width": 32, "context": 16, "dropout": 0.1}
    return Config(model=ModelConfig(**sizes | model), train=TrainConfig(batch_size=2))


def precision(dtype: torch.dtype = torch.bfloat16) -> MixedPrecision:
    return MixedPrecision(torch.device("cpu"), dtype)


@cache
def _composed(overrides: tuple[str, ...], on: Machine, of: type[Config]) -> Config:
    return configs.load(overrides, on, of)


def composed(overrides: list[str], of: type[Config] = Config, on: Machine = CPU) -> Config:
    """`configs.load`; composing takes longer than some runs here, so each is composed once."""
    return copy.deepcopy(_composed(tuple(overrides), on, of))


def train_here(
    overrides: list[str],
    folder: Path,
    plot: bool = False,
    on: Machine = CPU,
    world: World = ALONE,
    cfg: Config | None = None,
):
    """(summary, metrics) of a run in this process, or on this rank of it; without its picture, which would take longer than the
    training.

    `cfg` is what `overrides` give, if it is composed already.
    """
    import train

    keys = [override for override in overrides if "=" in override and override.partition("=")[0] not in GROUPS]
    cfg = cfg or composed(overrides, on=on)
    origin = world.on_first(lambda: find_start(cfg, folder, keys, chosen=True))
    with open_run(origin, torch.device("cpu"), world=world) as run:
        if not plot:
            run.draw = lambda: None  # type: ignore[method-assign]
        summary = train.train(origin.cfg, run, on, world)
    return summary, read_metrics(run.folder)


def newest(folder: Path) -> Path:
    """The newest checkpoint of the run in `folder`."""
    return checkpoint.locate(folder)


def losses(metrics: list[dict], name: str = "train/loss") -> list[float]:
    return [line[name] for line in metrics if name in line]


def curves(folder: Path) -> torch.Tensor:
    """All losses and gradient norms of the run in `folder`."""
    lines = read_metrics(folder)
    return torch.tensor([value for name in ("train/loss", "train/grad_norm", "val/loss") for value in losses(lines, name)])


def assert_same_run(found: Path, whole: Path) -> None:
    """Losses, weights and the optimizer's state are those of the run in `whole`, but for the order of sums."""
    torch.testing.assert_close(curves(found), curves(whole), rtol=1e-5, atol=0)
    for file in ("model.safetensors", "training.safetensors"):
        ours, expected = (load_file(newest(folder) / file) for folder in (found, whole))
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            # a second moment is smaller than any tolerance that is not its own
            atol = 1e-4 * tensor.abs().max().item() if file.startswith("training") else 1e-5
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=atol, msg=lambda why, name=name: f"{name}: {why}")


def logged(folder: Path) -> int:
    """The last step in the run's metrics; 0 where there is none."""
    return max((line["step"] for line in read_metrics(folder)), default=0)


def bits(folder: Path) -> dict[str, object]:
    """All that a run gives, to be compared bit for bit; but for times and for where it is kept."""
    last = newest(folder)
    state = read_json(last / "state.json")
    for key in ("folder", "resume", "logging"):
        del state["config"][key]
    lines = read_metrics(folder)
    metrics = [{key: value for key, value in line.items() if not key.startswith("perf/")} for line in lines]
    files = {name: (last / name).read_bytes() for name in ("model.safetensors", "training.safetensors", "tokenizer.json")}
    results = {name: read_json(folder / "summary.json")[name] for name in ("final", "best")}
    best = (checkpoint.locate(folder / "best") / "model.safetensors").read_bytes()
    sample = (folder / "sample.txt").read_text(encoding="utf-8") if state["config"]["sample"]["tokens"] else None
    return files | {"state": state, "metrics": metrics, "results": results, "best": best, "sample": sample}


class FakeWandb:
    """Stands for the run that wandb.init returns, and keeps what it is told."""

    def __init__(self, monkeypatch):
        self.logged, self.summary, self.step_metrics, self.finish = [], {}, {}, Mock()
        monkeypatch.setattr("wandb.init", lambda **arguments: vars(self).update(arguments=arguments) or self)
        monkeypatch.setattr("wandb.Image", lambda path: f"image {path}")

    def define_metric(self, name, step_metric):
        self.step_metrics[name] = step_metric

    def log(self, values, step):
        self.logged.append((step, values))


def environment(cwd: Path, **more: str) -> dict[str, str]:
    """For a program that starts in this folder: without credentials and without Triton's interpreter, and with `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "WANDB_", "HYDRA_"))}
    return kept | {"NETRC": str(cwd / "no_netrc"), "PYTHONUNBUFFERED": "1"} | more


def run_folders(cwd: Path) -> list[Path]:
    return sorted(path.parent for path in (cwd / "runs").rglob("config.yaml") if "wandb" not in path.parts)


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


def raising(error: BaseException) -> Callable:
    """A function that raises this, whatever it is given."""

    def raises(*_, **__):
        raise error

    return raises


no_space = raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))  # in place of what writes a file: the disk is full
