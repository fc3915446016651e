"""Tokens for steps that are timed."""

import numpy as np

from configs import Config


def token_stream(cfg: Config) -> np.ndarray:
    """Random tokens, the frequent ones as frequent as words are (Mandelbrot's law): the gradient of the embedding takes longer
    where rows repeat."""
    assert cfg.model.vocab_size is not None
    weights = 1 / (np.arange(cfg.model.vocab_size) + 2.7)
    count = 64 * cfg.train.batch_size * cfg.model.context + 1  # then they come again in another order
    return np.random.default_rng(cfg.seed).choice(cfg.model.vocab_size, size=count, p=weights / weights.sum())
