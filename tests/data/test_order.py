"""The order of an epoch is a permutation that looks like a random one."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from data.order import SORTED, Order, encipher


def keys(seed: int, rounds: int = 10) -> np.ndarray:
    return np.random.Philox(seed).random_raw(rounds)


@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_each_number_below_the_bound_is_enciphered_as_another_one(below, seed):
    numbers = np.arange(below + 5)
    found = encipher(numbers, below, keys(seed))
    assert sorted(found) == list(numbers) and (found[below:] == numbers[below:]).all()


@pytest.mark.parametrize("windows", [SORTED, SORTED + 1, 2**19])
def test_an_order_has_each_window_once_and_any_part_of_it_is_the_same_alone(windows):
    order, positions = Order(windows, seed=3, epoch=1), np.arange(windows)
    whole = order[positions]
    assert np.bincount(whole, minlength=windows).max() == 1
    some = np.random.default_rng(0).permutation(windows)[:1000]
    assert (Order(windows, seed=3, epoch=1)[some] == whole[some]).all()
    others = [Order(windows, 4, 1), Order(windows, 3, 2)]
    assert all((other[positions] == whole).mean() < 1e-4 and other.random != order.random for other in others)


def test_a_large_order_stays_as_it_is_and_needs_no_memory_and_an_older_one_is_sorted_as_it_was():
    first = Order(2**19, seed=3, epoch=1)[np.arange(5000)]
    assert hashlib.sha256(first.astype("<i8").tobytes()).hexdigest()[:16] == "14937d669e1fe71e"
    order = Order(2**62, seed=0, epoch=0)
    assert len(set(order[2**61 + np.arange(64)].tolist())) == 64
    bits = np.random.Philox(np.random.SeedSequence([5, 6])).random_raw(SORTED + 11)
    assert (Order(SORTED + 10, 5, 6, version=1)[np.arange(SORTED + 10)] == np.argsort(bits[1:], kind="stable")).all()


@pytest.mark.parametrize("below", [257, 4096])
def test_permutations_of_many_keys_are_as_random_ones(below):
    """Each statistic against its distribution among all permutations; the bounds are those of p = 1e-4."""
    found = np.stack([encipher(np.arange(below), below, keys(seed)) for seed in range(600)])
    moves = np.diff(found, axis=1) % below
    bins = [(found[:, 0], below), (found[:, below // 2], below), (moves[:, 7], below), (found[:, 1] ^ found[:, 0], 16)]
    for values, of in bins:  # a place, a step and the low bits of two neighbours are uniform
        counts = np.bincount(values * 16 // of if of == below else values % 16, minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4
    fixed = (found == np.arange(below)).sum(axis=1)  # of a random permutation: Poisson with mean 1
    assert abs(fixed.mean() - 1) < 4 / np.sqrt(len(found)) and 0.7 < fixed.var() < 1.35
    rank = np.array([stats.spearmanr(np.arange(below), row).statistic for row in found[:200]]) * np.sqrt(below - 1)
    assert stats.kstest(rank, "norm").pvalue > 1e-4
