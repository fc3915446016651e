"""What a training step reads: its number, batch, seeds and rate, as tensors that stay where they are.

A table on the device has a row for each of the next steps, made from pure functions of the step. A step reads the row that a
counter on the device points to and moves the counter on, so that replays of one CUDA graph are steps that follow each other.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs import Config
from data import Batches
from data.windows import Windows, pinned
from training.schedule import learning_rate

BLOCK = 64  # steps in the table, which is made and copied at once


class Read(NamedTuple):
    """Of one step, on the device."""

    number: Tensor  # int64 [1], counted from 0
    tokens: Tensor  # int64 [rows, context]
    targets: Tensor  # the token that follows each
    seeds: Tensor  # int64 [micro-batches, dropout sites]
    rate: Tensor  # a scalar; fp32, on a CPU fp64


class Inputs:
    """On the host `load(step)`, and then `read()` in the step. Several models may read one after the other.

    Args:
        sites: dropout sites of the model.
    """

    def __init__(self, batches: Batches, cfg: Config, sites: int, device: torch.device) -> None:
        self.device, self._sites = device, sites
        self._table = torch.zeros(BLOCK, 1 + batches.rows + cfg.train.accumulation * sites, dtype=torch.int64, device=device)
        self._rates = torch.zeros(BLOCK, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._windows = Windows(batches.tokens, lambda step: self._batches.starts(step), batches.context, batches.rows, device)
        self.begin(batches, cfg)

    def begin(self, batches: Batches, cfg: Config) -> None:
        """Makes these the steps of another run, of the same sizes and tokens."""
        self._batches, self._cfg = batches, cfg
        self._steps, self._next = range(0), -1  # in the table; that the counter points to
        self._draws: list[int] = []  # seeds of torch's generator
        self._windows.forget()

    def load(self, step: int) -> None:
        """Makes `step` the one that is read next, and seeds torch's generator for it. Does not wait for the device.

        Dropout of attention and norm.dropout_masks=native draw from that generator. All micro-batches of a step draw on.
        """
        if step not in self._steps:
            self._fill(range(step, step + BLOCK))
        elif step != self._next:
            self._at.fill_(step - self._steps.start)
        self._next = step + 1
        self._windows.load(step)
        seed_generator(self._draws[step - self._steps.start], self.device)

    def read(self) -> Read:
        row, rate = self._table.index_select(0, self._at)[0], self._rates.index_select(0, self._at)[0]
        self._at += 1
        number, starts, seeds = row.tensor_split((1, 1 + self._batches.rows))
        windows = self._windows.read(starts)
        return Read(number, windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), seeds.view(-1, self._sites), rate)

    def _fill(self, steps: range) -> None:
        cfg, rank, parts = self._cfg, self._batches.rank, range(self._cfg.train.accumulation)
        drawn = [[draw_seeds(cfg.seed, step, part, rank, self._sites + 1) for part in parts] for step in steps]
        rows = [np.concatenate([[step], self._batches.starts(step), *(part[1:] for part in of)])
                for step, of in zip(steps, drawn, strict=True)]  # fmt: skip
        rates = [learning_rate(step, cfg.train.steps, cfg.optim) for step in steps]
        for place, values in ((self._table, np.stack(rows)), (self._rates, np.array(rates))):
            place.copy_(pinned(torch.from_numpy(values).to(place.dtype), self.device), non_blocking=True)
        self._at.zero_()
        self._steps, self._draws = steps, [int(first[0]) for first, *_ in drawn]


def draw_seeds(seed: int, step: int, micro_batch: int, rank: int, count: int) -> np.ndarray:
    """int64 [count], not negative: a pure function, so that evaluation, logging and restarts can't shift what is random in a
    step. The first word of its first micro-batch seeds torch's generator, the others are those of dropout sites."""
    bits = hashlib.shake_128(struct.pack("<4q", seed, step, micro_batch, rank)).digest(8 * count)
    return (np.frombuffer(bits, dtype="<u8") >> np.uint64(1)).astype(np.int64)


def seed_generator(seed: int, device: torch.device) -> None:
    """Seeds torch's generator of the device. torch.manual_seed would also store, at every step, a call and its stack trace for
    each kind of device that is not there."""
    (torch.default_generator if device.type == "cpu" else torch.get_device_module(device)).manual_seed(seed)
