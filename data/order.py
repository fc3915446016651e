"""The order of an epoch: a permutation of its windows by index, a pure function of seed and epoch.

Up to SORTED windows are sorted by random numbers, so each of their permutations is equally likely. More are put in order by a
block cipher on the numbers below `windows`, which takes the same time and memory at any place of any epoch: a Feistel network
of ten rounds, as NIST's FF1 for small domains (SP 800-38G), whose round function is the finalizer of SplitMix64 (Steele et al.
2014) with keys from Philox; numbers beyond the last window are enciphered again (Black and Rogaway 2002, "cycle walking").
"""

from functools import lru_cache

import numpy as np

VERSION = 2  # in checkpoints; 1 sorts the windows of any corpus
SORTED = 2**18  # is sorted in 20 ms
ROUNDS = 10
BLOCK = 2**12  # windows enciphered together: NumPy's calls then take less time than their work


class Order:
    """`order[positions]`: the windows, int64, at these positions, int64, of an epoch. `order.random` is a random number."""

    def __init__(self, windows: int, seed: int, epoch: int, version: int = VERSION) -> None:
        # Random bits instead of Generator methods: NumPy promises the same bits in every version, and a resumed run may have a
        # newer version.
        bits = np.random.Philox(np.random.SeedSequence([seed, epoch]))
        self.random = int(bits.random_raw())
        if version == 1 or windows <= SORTED:
            order, self._size = np.argsort(bits.random_raw(windows), kind="stable").astype(np.int64), windows
            self._block = lambda number: order
        else:
            keys, self._size = bits.random_raw(ROUNDS), BLOCK
            self._block = lru_cache(2)(lambda number: encipher(np.arange(BLOCK) + number * BLOCK, windows, keys))

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        blocks, places = np.divmod(positions, self._size)
        found = np.empty_like(positions)
        for block in np.unique(blocks):
            found[blocks == block] = self._block(int(block))[places[blocks == block]]
        return found


def encipher(numbers: np.ndarray, below: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of the numbers in [0, below), by `keys` uint64 [rounds]; int64 as `numbers`. Numbers beyond stay."""
    bits = max(2, (below - 1).bit_length())  # fewer than two tries for a number, on average
    found, wide, narrow = numbers.astype(np.uint64), np.uint64(bits - bits // 2), np.uint64(bits // 2)
    left = np.flatnonzero(numbers < below)
    while len(left):
        high, low = found[left] >> narrow, found[left] & _ones(narrow)
        for number, key in enumerate(keys):
            if number % 2:
                low ^= _mixed(high + key) & _ones(narrow)
            else:
                high ^= _mixed(low + key) & _ones(wide)
        found[left] = high << narrow | low
        left = left[found[left] >= below]
    return found.astype(np.int64)


def _ones(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64, modulo 2⁶⁴."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
