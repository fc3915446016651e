"""Signals that come twice, that the parent ignores, and that reach the ranks at different moments."""

import signal

import pytest
import torch.distributed as dist

from training.distributed import World
from training.interrupt import Interrupt, Stopped, exit_on_signals, pass_over


class Asked(World):
    """Ranks that no signal had reached when they were asked; one reaches this rank while they answer."""

    def max(self, number: int) -> int:
        if not number:
            signal.raise_signal(signal.SIGTERM)
        return number


def ranks(torchrun):
    return World(store=dist.HashStore() if torchrun else None)


def test_a_signal_that_comes_while_the_ranks_agree_stops_none_of_them_until_they_agree_again():
    with pytest.raises(Stopped, match="143"), Interrupt(Asked()) as interrupt:
        assert not interrupt.poll()[0], "the other ranks go on: to stop alone would leave them waiting"
        assert interrupt.poll()[0] == signal.SIGTERM


@pytest.mark.parametrize("torchrun", [False, True])
def test_sigterm_that_comes_twice_is_one_also_behind_the_block_whose_end_it_stops(torchrun):
    exit_on_signals()
    with pytest.raises(Stopped, match="143"):  # before the first step
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Stopped, match="143"), Interrupt(ranks(torchrun)):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)  # by default the second one would be the end of this process
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)  # while W&B is closed, say


@pytest.mark.parametrize(("torchrun", "handler"), [(True, pass_over), (False, signal.SIG_DFL)])
def test_a_second_ctrl_c_ends_a_process_alone_at_once_which_the_first_one_says(torchrun, handler, capsys):
    with pytest.raises(Stopped, match="130"), Interrupt(ranks(torchrun)):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    assert ("Ctrl-C again quits at once." in capsys.readouterr().err) != torchrun


def test_handlers_are_those_of_before_where_no_signal_came_and_nohup_is_heeded():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert signal.getsignal(signal.SIGTERM) is not before
        signal.raise_signal(signal.SIGHUP)
        assert not interrupt.poll()[0]
    assert signal.getsignal(signal.SIGTERM) is before
