"""Random numbers as a pure function of where a run stands, so that evaluation, logging and restarts can't shift them."""

import hashlib
import struct

import numpy as np
import torch


def seed_micro_batch(seed: int, step: int, micro_batch: int, rank: int, sites: int) -> torch.Tensor:
    """Seeds everything random in one forward pass and returns the seeds of its dropout sites.

    Torch's own generators are seeded too: dropout on attention weights and norm.dropout_masks=native draw from them.

    Returns:
        int64 [sites] on the CPU, not negative: the same for every norm implementation, and after a restart.
    """
    bits = hashlib.shake_128(struct.pack("<4q", seed, step, micro_batch, rank)).digest(8 * (sites + 1))
    words = (np.frombuffer(bits, dtype="<u8") >> np.uint64(1)).astype(np.int64)
    torch.manual_seed(int(words[0]))
    return torch.from_numpy(words[1:].copy())
