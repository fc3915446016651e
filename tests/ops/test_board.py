"""The board of programs that share rows: its words, and the order in which they are written and read, in a model of it."""

import random

import pytest
import torch
import triton
import triton.language as tl

from ops import tiling
from ops.board_kernels import board_place, publish


@triton.jit
def publish_in(p_board, turn, RING: tl.constexpr):
    """The second of two programs that share a row publishes 1.5 and 2.5."""
    p_words, lap = board_place(p_board, 0, turn, 1, 2, RING)
    publish(p_words, lap, tl.full([1, 1], 1.5, tl.float32), tl.full([1, 1], 2.5, tl.float32), 1, 2, False)


@pytest.mark.parametrize("turn", [0, 3, 4, 6, 8])
def test_a_word_has_its_place_its_sums_and_the_bit_of_its_lap(turn, device):
    board = torch.full((4, 2), -1, dtype=torch.int64, device=device)
    publish_in[(1,)](board, turn, RING=4)
    word = board[turn % 4, 1].reshape(1).cpu()
    assert (board == -1).sum() == 7
    assert word.item() >> 32 & 1 == turn // 4 % 2
    assert (word & ~(1 << 32)).view(torch.float32).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("each_publishes", [True, False], ids=["warps publish", "programs publish"])
@pytest.mark.parametrize("lag", [1, 2])
def test_all_have_read_a_word_before_another_takes_its_place(lag, each_publishes):
    ring = tiling.ring(tiling.Tile(1, 1024, 0, 4, 1, 3, 1, True, lag=lag))
    assert all(goes_well(lag, ring, seed, each_publishes, meet=not each_publishes) for seed in range(200))


@pytest.mark.parametrize("lag", [1, 2])
def test_the_model_finds_a_board_that_is_too_short_and_warps_that_only_read_and_do_not_meet(lag):
    assert all(goes_well(lag, 2 + 2 * lag, seed, True, meet=False) for seed in range(200))
    assert not all(goes_well(lag, 1 + 2 * lag, seed, True, meet=False) for seed in range(200))
    assert not all(goes_well(lag, 4 * lag, seed, False, meet=False) for seed in range(200))


def goes_well(lag: int, ring: int, seed: int, each_publishes: bool, meet: bool, programs: int = 3, warps: int = 2) -> bool:
    """Whether all warps, in random order and some much slower than others, get to the end and find what they ask for.

    In round i a warp publishes, or only one of its program does, and waits until everyone's word of round i − lag bears the lap
    of that round. meet: all warps of a program have come to a round before one of them publishes.
    """
    chance = random.Random(seed)
    everyone = [(program, warp) for program in range(programs) for warp in range(warps)]
    authors = [w for w in everyone if each_publishes or w[1] == 0]
    pace = {w: chance.choice([1, 1, 30]) for w in everyone}
    board = [dict.fromkeys(authors, (1, -1)) for _ in range(ring)]  # the lap's bit and the round
    turn, asks = dict.fromkeys(everyone, 0), dict.fromkeys(everyone, False)

    def may_go_on(w):
        before = turn[w] - lag
        if asks[w]:
            return before < 0 or all(lap == before // ring & 1 for lap, _ in board[before % ring].values())
        return not meet or all(turn[w[0], other] >= turn[w] for other in range(warps))

    while running := [w for w in everyone if turn[w] < 30]:
        ready = [w for w in running if may_go_on(w)]
        if not ready:  # all wait for each other
            return False
        w = chance.choices(ready, [pace[r] for r in ready])[0]
        if asks[w]:
            before = turn[w] - lag
            if before >= 0 and any(found != before for _, found in board[before % ring].values()):
                return False
            turn[w] += 1
        elif w in authors:
            board[turn[w] % ring][w] = (turn[w] // ring & 1, turn[w])
        asks[w] = not asks[w]
    return True
