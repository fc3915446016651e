"""The bar of an ablation tells a time left that a person can believe."""

import pytest

from ablation.progress import GUESSES, Progress, clock


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def now():
    return Clock()


def work(progress, now, kind, seconds, units=1):
    for _ in range(units):
        now.seconds += seconds
        progress.add(kind)


def test_compilation_does_not_slow_the_steps_that_are_left(now):
    plan = {"compiled warm-up": 3, "compiled blocks": 60, "parity": 100}
    with Progress(plan, now) as progress:
        work(progress, now, "compiled warm-up", 60.0, 3)
        assert progress.seconds_left == pytest.approx(60 * GUESSES["compiled blocks"] + 100 * GUESSES["parity"])
        work(progress, now, "compiled blocks", 0.5, 20)
        assert progress.seconds_left == pytest.approx(40 * 0.5 + 100 * GUESSES["parity"])


def test_what_a_kind_took_in_one_cell_is_expected_of_the_next(now):
    plan = {"compiled warm-up": 6, "compiled blocks": 20}
    with Progress(plan, now) as progress:
        work(progress, now, "compiled warm-up", 40.0, 3)
        work(progress, now, "compiled blocks", 1.0, 10)
        assert progress.seconds_left == pytest.approx(3 * 40.0 + 10 * 1.0)
        work(progress, now, "compiled warm-up", 40.0, 3)
        work(progress, now, "compiled blocks", 1.0, 12)  # more than was planned
        assert progress.seconds_left == 0


def test_times_are_written_in_minutes_and_seconds():
    assert (clock(125.4), clock(3725)) == ("02:05", "1:02:05")
