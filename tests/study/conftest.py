"""An engine that has trained a tiny model."""

import copy

import pytest
import torch

from data import load_corpus
from study.config import Config
from study.engine import Engine
from tests.runs import precision


@pytest.fixture
def trained():
    """trained(cfg, steps): the engine of a run of cfg after so many steps, and of a run with another seed before."""

    def trained(cfg: Config, steps: int, on=None) -> Engine:
        corpus, other = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context), copy.deepcopy(cfg)
        other.seed += 1
        engine = Engine(cfg, on or precision(torch.float32), corpus)
        for each in (other, cfg):
            engine.begin(each)
            engine.advance(steps)
        return engine

    return trained
