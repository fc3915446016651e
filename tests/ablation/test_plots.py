"""The pictures of a report: what they show, of numbers that are hard to draw too."""

import dataclasses

import pytest

from ablation import plots
from tests.ablation import results
from training.attribution import Share


def test_losses_that_end_in_nan_or_are_all_the_same_are_drawn(tmp_path):
    parity = results.parity_of({})
    first = next(iter(parity.losses.values()))
    for runs in (first, [[float("nan")] * parity.steps] * len(parity.seeds)):
        same = dataclasses.replace(parity, losses=dict.fromkeys(parity.losses, first) | {results.PARITY_ARMS[2]: runs})
        plots.losses(same, tmp_path / "parity.png")
        assert (tmp_path / "parity.png").stat().st_size > 5000


def test_the_norms_have_their_time_in_the_picture_where_they_are_a_twentieth_of_either_arms_step(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append(figure))
    cell = results.ablation(overrides=[{}], modes=["eager"]).cells[0]
    torch, fused = ([Share("norm", norm, 75), Share("GEMM", 61.0, 195)] for norm in (17.5, 3.0))
    cell = dataclasses.replace(cell, attribution=dataclasses.replace(cell.attribution, torch=torch, fused=fused))
    assert plots.attributions([cell], tmp_path / "x.png")
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["17.5", "61.0", "78.5 ms", "3.00", "61.0", "64.0 ms"]


@pytest.mark.parametrize("most", [3e-7, 3e-3], ids=["within a decade", "over four"])
def test_the_axis_of_distances_from_the_reference_has_labels_to_read_a_scale_from(tmp_path, monkeypatch, most):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append(figure))
    parity = results.parity_of({}, seeds=1, steps=4)
    exact, *others = parity.losses
    off = {name: [[7.0, 7.0 + most, 7.0, 7.0 + 1.2e-7]] for name in others}
    plots.losses(dataclasses.replace(parity, losses={exact: [[7.0] * 4], **off}), tmp_path / "x.png")
    below = figures[0].axes[1]
    low, high = below.get_ylim()
    assert low == 0 and most < high and sum(0 < at <= high for at in below.get_yticks()) >= 2


def test_the_picture_of_finished_runs_has_every_run_and_every_final_loss(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append((figure, title)))
    curve, other = [(250, 2.0), (500, 1.5)], [(250, 2.25), (500, 1.25)]
    runs = [("torch", 1, curve, 1.4), ("fused", 1, other, 1.3), ("fused", 2, [], 1.2)]
    plots.trained(runs, "here", tmp_path / "x.png")
    ((figure, title),) = figures
    above, between, below = figure.axes
    drawn = [[list(line.get_xdata()), list(line.get_ydata())] for line in above.lines]
    assert drawn == [[[250, 500], [2.0, 1.5]], [[250, 500], [2.25, 1.25]], [[], []]] and "here" in title
    seed, mean, _ = between.lines  # of the one seed that has both
    assert [list(line.get_ydata()) for line in (seed, mean)] == [[0.25, -0.25]] * 2
    assert dots(below) == [(1.4, "#111111"), (1.3, "#111111"), (1.2, "#111111")] and "hollow" not in below.get_xlabel()
    assert means(below) == [1.4, 1.3], "not of the seed that has no partner"
    assert [text.get_text() for text in below.texts] == ["1", "1", "2"]


def test_the_picture_of_runs_made_again_has_the_mean_of_each_seed_and_how_far_they_are_apart(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_finish", lambda figure, title, path: figures.append(figure))
    first, second, fused = [(250, 2.0), (500, 1.5)], [(250, 2.5), (500, 1.0)], [(250, 2.5), (500, 1.5)]
    plots.trained([("torch", 1, first, 1.5), ("fused", 1, fused, 1.5), ("torch", 1, second, 1.0)], "here", tmp_path / "x.png")
    _, between, below = figures[0].axes
    seed, again, mean, _ = between.lines
    assert [list(line.get_ydata()) for line in (seed, again, mean)] == [[0.25, 0.25], [0.5, -0.5], [0.25, 0.25]]
    assert any("made again" in text.get_text() for text in between.get_legend().get_texts())
    assert dots(below) == [(1.5, "#111111"), (1.0, "white"), (1.5, "#111111")]
    assert means(below) == [1.25, 1.5] and "hollow: made again" in below.get_xlabel()
    assert [text.xyann[1] > 0 for text in below.texts] == [True, False, True], "of a run made again beneath"


def dots(axes):
    """Final losses in the order drawn, and the colour of each."""
    return [(line.get_xdata()[0], line.get_markerfacecolor()) for line in axes.lines if line.get_marker() == "o"]


def means(axes):
    return [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() != "o"]
