"""Signals that reach the ranks at different moments."""

import signal

from training.distributed import World
from training.interrupt import Interrupt


class Asked(World):
    """Ranks that no signal had reached when they were asked; one reaches this rank while they answer."""

    def highest(self, number: int) -> int:
        if not number:
            signal.raise_signal(signal.SIGTERM)
        return number


def test_a_signal_that_comes_while_the_ranks_agree_stops_none_of_them_until_they_agree_again():
    with Interrupt(Asked()) as interrupt:
        assert not interrupt.wanted(), "the other ranks go on: to stop alone would leave them waiting"
        assert interrupt.wanted()

    assert interrupt.exit_code == 143
