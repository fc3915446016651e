"""python -m training.plot: several runs in one picture."""

import json

import pytest
import yaml

import configs
from training import plot
from training.plot import grouped, read_run
from training.storage import read_metrics


def run(folder, *overrides, worse=0.0):
    """A folder as a run of 30 steps leaves it; 1024 tokens a step, 2 bytes a token."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(configs.from_dict({}, overrides))))
    lines = []
    for step in (10, 20, 30):
        at, loss = {"step": step, "tokens": 1024 * step}, 5 - step / 10 + worse
        lines.append(at | {"train/loss": loss + 1, "train/bits_per_byte": 0.9 * loss})
        lines.append(at | {"val/loss": loss, "val/bits_per_byte": loss / 2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_are_laid_over_one_another_in_the_unit_and_by_what_is_asked_for(tmp_path, monkeypatch, capsys):
    drawn, close = {}, plot.pyplot.close

    def look(figure):
        drawn.update({line.get_label(): list(zip(*line.get_data(), strict=True)) for line in figure.axes[0].lines})
        close(figure)

    monkeypatch.setattr(plot.pyplot, "close", look)
    run(tmp_path / "a")
    run(tmp_path / "b", "norm.impl=torch")
    (tmp_path / "empty").mkdir()
    command = [*map(str, sorted(tmp_path.glob("*"))), "--output", str(tmp_path / "both.png")]
    assert plot.main([*command, "--unit", "nats"]) == 0
    said = capsys.readouterr()
    assert "empty: no metrics.jsonl there" in said.err and "both.png: loss, nats per token, 2 runs" in said.out
    assert (tmp_path / "both.png").stat().st_size > 5000
    assert drawn["norm.impl=fused"] == drawn["norm.impl=torch"] == [(10, 4.0), (20, 3.0), (30, 2.0)]
    assert plot.main([*command, "--by", "tokens"]) == 0
    assert drawn["norm.impl=fused"] == [(10240, 2.0), (20480, 1.5), (30720, 1.0)]
    (tmp_path / "mine").write_text("mine")
    assert plot.main([str(tmp_path / "a"), "--output", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine").read_text() == "mine"
    capsys.readouterr()
    assert plot.main([str(tmp_path / "a"), "--output", str(tmp_path / "ours")]) == 0  # a PNG, as without a suffix
    assert capsys.readouterr().out == f"{tmp_path}/ours: bits per byte, 1 run\n"
    assert (tmp_path / "ours").read_bytes().startswith(b"\x89PNG")


def test_the_first_losses_do_not_flatten_the_rest():
    low, high = plot.limits([(0, 11.0), (1, 10.0), *((step, 3.0) for step in range(2, 40))], [(39, 2.5)])
    assert 2.4 < low < 2.5 and 3.0 < high < 3.1


def names_of(curves):
    return [group.name for group in grouped(curves)]


def test_the_legend_has_what_differs_and_folders_where_that_does_not_tell(tmp_path):
    given = {"a": [], "b": ["optim.clip_norm=0"], "c": ["optim.clip_norm=0"]}
    a, b, c = (read_run(run(tmp_path / name, "seed=3", f"logging.name={name}", *more)) for name, more in given.items())
    assert names_of([a, b]) == ["optim.clip_norm=0.0", "optim.clip_norm=1.0"]
    assert f"{tmp_path}/b: optim.clip_norm=0.0" in names_of([a, b, c])
    assert names_of([b, c]) == [f"{tmp_path}/b", f"{tmp_path}/c"]
    assert names_of([a]) == [f"{tmp_path}/a"]
    alike = ["model.layers=1", "model.heads=2", "model.width=64", "model.context=16"]  # all that an entry has room for
    d, e = (read_run(run(tmp_path / name, *alike, f"optim.lr={name}")) for name in ("1", "2"))
    assert names_of([a, d, e])[0] == f"{tmp_path}/1: {', '.join(alike)}"


def test_runs_that_differ_in_seeds_are_one_line_with_a_band_and_lines_are_in_natural_order(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plot.pyplot, "close", figures.append)
    curves = [
        read_run(run(tmp_path / f"{layers}_{seed}", f"model.layers={layers}", f"seed={seed}", worse=layers / 10 + seed))
        for layers in (1, 10, 2, 20, *range(3, 10), 11, 12, 13)
        for seed in (1, 2)
    ]
    plot.overlay(curves, tmp_path / "x.png", unit="nats", best=3)
    [axes] = figures[0].axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines if line.get_label().startswith("model")}
    assert list(lines) == [f"model.layers={layers}, mean of 2 seeds" for layers in (1, 2, 3)]
    assert list(lines["model.layers=2, mean of 2 seeds"]) == pytest.approx([4 + 1.7, 3 + 1.7, 2 + 1.7])
    low, high = axes.collections[1].get_datalim(axes.transData).intervaly
    assert (low, high) == pytest.approx((2 + 1.2, 4 + 2.2))
    assert "the best 3 of 14 lines" in figures[0].get_suptitle()
    plot.overlay(curves[::2], tmp_path / "x.png")
    names = [name.get_text() for name in figures[1].legends[0].get_texts()]
    assert names == [f"model.layers={layers}" for layers in range(1, 13)]  # a dozen


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["nowhere"], "none of these is a run"),
        (["run", "--output", "x.nothing"], "nothing"),
        (["run", "--output", "run/config.yaml/x.png"], "config.yaml"),
    ],
)
def test_what_can_not_be_drawn_is_refused_by_name(here, capsys, more, message):
    run(here / "run")
    assert plot.main(more) == 2
    assert message in capsys.readouterr().err


def test_lines_of_metrics_that_are_no_record_are_left_out(tmp_path):
    no_records = ["null", "1", "[]", "{}", '{"train/loss": 1.0}', '{"step": 3, "tra', "\0"]
    no_records += [
        f'{{"step": 3, "train/loss": {value}}}' for value in ("NaN", "-Infinity", "1e999", "null", '"2"', "[]", "{}")
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"step": 1, "train/loss": 2.0}', *no_records, '{"step": 2}']))
    assert read_metrics(tmp_path) == [{"step": 1, "train/loss": 2.0}, {"step": 2}]
