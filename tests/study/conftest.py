"""An engine that has trained a tiny model."""

import pytest
import torch

from configs import Config
from data import load_corpus
from study.engine import Engine, initial_values, windows_of
from tests.runs import precision


def begin(engine: Engine, cfg: Config, corpus) -> None:
    device = engine.precision.device
    engine.begin(cfg, initial_values(cfg, engine.precision, corpus), windows_of(cfg, corpus, device))


@pytest.fixture
def trained():
    """trained(cfg, steps): the engine of a run of cfg after so many steps, and of another run before."""

    def trained(cfg: Config, steps: int, on=None) -> Engine:
        corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
        engine = Engine(cfg, on or precision(torch.float32), corpus)
        for _ in range(2):
            begin(engine, cfg, corpus)
            engine.advance(steps)
        return engine

    return trained
