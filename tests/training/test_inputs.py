"""What a step reads is a pure function of the step, from whatever tokens and in whatever order steps are asked for."""

import numpy as np
import pytest
import torch

import data.windows
from data import Batches
from tests.runs import composed
from training.inputs import BLOCK, Inputs, draw_seeds
from training.schedule import learning_rate

CPU = torch.device("cpu")


def words(seed, step, micro_batch, rank=0):
    return draw_seeds(seed, step, micro_batch, rank, 5)


@pytest.mark.parametrize("resident", [2**30, 0], ids=["resident", "read ahead"])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_every_step_reads_its_own_batch_seeds_and_rate_in_any_order_and_in_another_run(
    tiny, monkeypatch, tmp_path, dtype, resident
):
    monkeypatch.setattr(data.windows, "RESIDENT_BYTES", resident)
    cfg = composed([*tiny, "train.accumulation=2", "train.steps=200"])
    tokens = np.random.default_rng(0).integers(2**16 - 9, size=4000).astype(dtype)
    tokens.tofile(tmp_path / "tokens")
    tokens = np.memmap(tmp_path / "tokens", dtype, mode="r")
    runs = [Batches(tokens, context=32, batch_size=8, seed=seed, rank=1, ranks=2) for seed in (1, 2)]
    inputs = Inputs(runs[0], cfg, sites=4, device=CPU)
    for seed, batches in enumerate(runs, start=1):
        cfg.seed = seed
        inputs.begin(batches, cfg)
        for step in [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 7, 8, 8, 199, 0]:
            inputs.load(step)
            found = inputs.read()
            assert found.number.tolist() == [step]
            for part, first in ((found.tokens, 0), (found.targets, 1)):
                expected = np.stack([tokens[start + first :][:32] for start in batches.starts(step)])
                assert part.is_contiguous() and torch.equal(part, torch.from_numpy(expected.astype(np.int64)))
            drawn = np.stack([words(seed, step, part, rank=1) for part in range(2)])
            assert np.array_equal(found.seeds.numpy(), drawn[:, 1:]) and torch.initial_seed() == drawn[0, 0]
            assert found.rate.item() == learning_rate(step, 200, cfg.optim)


def test_each_place_has_other_seeds_all_positive_int64():
    places = [(seed, step, part, rank) for seed in (1, 2) for step in range(10) for part in range(4) for rank in range(4)]
    drawn = np.concatenate([words(*place) for place in places])
    assert len(set(drawn.tolist())) == len(drawn) == 2 * 10 * 4 * 4 * 5
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() > 2**62, "all bits but the sign are in use"
