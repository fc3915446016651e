"""The pictures of a report: what they show, of numbers that are hard to draw too."""

import dataclasses

import pytest

from ablation import plots
from tests.ablation import results


def test_losses_that_end_in_nan_or_are_all_the_same_are_drawn(tmp_path):
    parity = results.parity_of({})
    first = next(iter(parity.losses.values()))
    for runs in (first, [[float("nan")] * parity.steps] * len(parity.seeds)):
        same = dataclasses.replace(parity, losses=dict.fromkeys(parity.losses, first) | {results.PARITY_ARMS[2]: runs})
        plots.losses(same, tmp_path / "parity.png")
        assert (tmp_path / "parity.png").stat().st_size > 5000


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A function: the three panels that plots.trained draws of these runs."""
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append(figure))

    def trained(*runs):
        plots.trained(runs, "here", tmp_path / "x.png")
        return figures[-1].axes

    return trained


def dots(axes):
    """Final losses in the order drawn, and the colour of each."""
    return [(line.get_xdata()[0], line.get_markerfacecolor()) for line in axes.lines if line.get_marker() == "o"]


def means(axes):
    return [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() != "o"]


def test_the_picture_of_finished_runs_has_every_run_and_every_final_loss(trained):
    curve, other = [(250, 2.0), (500, 1.5)], [(250, 2.25), (500, 1.25)]
    above, between, below = trained(("torch", 1, curve, 1.4), ("fused", 1, other, 1.3), ("fused", 2, [], 1.2))
    drawn = [[list(line.get_xdata()), list(line.get_ydata())] for line in above.lines]
    assert drawn == [[[250, 500], [2.0, 1.5]], [[250, 500], [2.25, 1.25]], [[], []]]
    seed, mean, _ = between.lines  # of the one seed that has both
    assert [list(line.get_ydata()) for line in (seed, mean)] == [[0.25, -0.25]] * 2
    assert dots(below) == [(1.4, "#111111"), (1.3, "#111111"), (1.2, "#111111")]
    assert means(below) == [1.4, 1.3], "not of the seed that has no partner"


def test_the_picture_of_runs_made_again_has_the_mean_of_each_seed_and_how_far_they_are_apart(trained):
    first, second, fused = [(250, 2.0), (500, 1.5)], [(250, 2.5), (500, 1.0)], [(250, 2.5), (500, 1.5)]
    _, between, below = trained(("torch", 1, first, 1.5), ("fused", 1, fused, 1.5), ("torch", 1, second, 1.0))
    seed, again, mean, _ = between.lines
    assert [list(line.get_ydata()) for line in (seed, again, mean)] == [[0.25, 0.25], [0.5, -0.5], [0.25, 0.25]]
    assert dots(below) == [(1.5, "#111111"), (1.0, "white"), (1.5, "#111111")] and means(below) == [1.25, 1.5]
