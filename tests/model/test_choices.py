"""A value of an enum that the code does not know is refused, and not trained as another value."""

import pytest
import torch

from configs import Config, keys
from configs.machine import Machine
from configs.schema import Choice
from model import GPT
from tests.runs import config
from training.build import is_fsdp
from training.optimizer import make_optimizer
from training.precision import MixedPrecision
from training.schedule import learning_rate

ELSEWHERE = {"data.source", "tokenizer.kind", "logging.wandb", "logging.without_key", "device"}  # no training
NAMES = [name for name, key in keys.schema().items() if keys.choices(key) and name not in ELSEWHERE]
ONLY = {"model.qk_norm_kind": {"qk_norm": True}}  # where it counts


class New(Choice):
    new = "new", "which the code has never seen"


def run(cfg: Config) -> None:
    """All of a training step that an enum decides."""
    MixedPrecision.of(cfg.train.precision, Machine("cpu"))
    is_fsdp(cfg.parallel)
    model = GPT(cfg.model, cfg.norm, vocab_size=16, loss=cfg.loss, mlp=cfg.mlp)
    optimizer = make_optimizer(model, cfg.optim)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    model(tokens, tokens).backward()
    learning_rate(99, 100, cfg.optim)
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_no_unknown_value_is_trained_as_another_one(name):
    cfg = config(**ONLY.get(name, {}))
    run(cfg)
    section, _, key = name.rpartition(".")
    setattr(getattr(cfg, section) if section else cfg, key, New.new)
    with pytest.raises((AssertionError, KeyError), match="new"):
        run(cfg)
