"""The order in which programs that share rows write and read their board, in a model of it: `ops/board_kernels.py`."""

import random

import pytest

from ops import tiling


@pytest.mark.parametrize("lag", [1, 2])
def test_all_have_read_a_word_before_another_takes_its_place(lag):
    tile = tiling.Tile(1, 1024, 0, 4, 1, 3, 1, True, lag=lag)
    assert all(goes_well(lag, tiling.ring(tile), seed) for seed in range(300))


@pytest.mark.parametrize("lag", [1, 2])
def test_the_model_finds_a_board_that_is_too_short(lag):
    assert all(goes_well(lag, 2 + 2 * lag, seed) for seed in range(300))
    assert not all(goes_well(lag, 1 + 2 * lag, seed) for seed in range(300))


def goes_well(lag: int, ring: int, seed: int, warps: int = 4, rounds: int = 30) -> bool:
    """Whether each of these warps, in random order and some much slower than others, finds what all published in the round it
    asks for. They publish round i, wait for everyone's words of the lap in which round i − lag is, and go on."""
    chance = random.Random(seed)
    pace = [chance.choice([1, 1, 30]) for _ in range(warps)]
    board = [[(1, -1)] * warps for _ in range(ring)]  # the lap's bit and the round
    turns, reads = [0] * warps, [False] * warps
    while any(turn < rounds for turn in turns):
        ready = [w for w in range(warps) if turns[w] < rounds and (not reads[w] or _there(board, turns[w] - lag, ring))]
        if not ready:  # all wait for each other
            return False
        w = chance.choices(ready, [pace[w] for w in ready])[0]
        turn = turns[w]
        if not reads[w]:
            board[turn % ring][w] = (turn // ring & 1, turn)
        else:
            if turn >= lag and any(found != turn - lag for _, found in board[(turn - lag) % ring]):
                return False
            turns[w] += 1
        reads[w] = not reads[w]
    return True


def _there(board: list, turn: int, ring: int) -> bool:
    return turn < 0 or all(lap == turn // ring & 1 for lap, _ in board[turn % ring])
