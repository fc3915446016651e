"""python -m training.plot: several runs in one picture."""

import json

import pytest
import yaml

import configs
from training import plot
from training.metrics import read_metrics
from training.plot import BITS, NATS, names_of, overlay, read_run


def run(folder, overrides=(), bytes_per_token=2.0, speed=2048.0, val=True):
    """A folder as a run of 30 steps leaves it; 1024 tokens a step."""
    folder.mkdir(parents=True)
    cfg = configs.compose_only(list(overrides))
    (folder / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(cfg)))
    lines = []
    for step in (10, 20, 30):
        loss = 5 - step / 10
        rate = {"perf/tokens_per_s": speed * 10 / step} if speed and step > 10 else {}
        bits = loss / 0.6931471805599453 / bytes_per_token
        figures = {"tokens": 1024 * step, "train/loss": loss, "train/bits_per_byte": 0.9 * bits}  # of text with another ratio
        lines.append({"step": step} | figures | rate)
        if val:
            lines.append({"step": step, "tokens": 1024 * step, "val/loss": loss, "val/bits_per_byte": bits})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The lines of each panel of the last picture: label → points."""
    panels = []
    real = plot.pyplot.close

    def close(figure):
        lines = [axes.lines for axes in figure.axes]
        panels[:] = [{line.get_label(): list(zip(*line.get_data(), strict=True)) for line in those} for those in lines]
        real(figure)

    monkeypatch.setattr(plot.pyplot, "close", close)
    return panels


def test_runs_are_laid_over_one_another_by_step_and_by_time(tmp_path, drawn, capsys):
    run(tmp_path / "a")
    run(tmp_path / "b", ["norm.impl=torch"], speed=1024.0)
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")  # Hydra's, which runs/*_sweep/* matches too
    assert plot.main([*map(str, sorted(tmp_path.glob("*"))), "--output", str(tmp_path / "both.png"), "--unit", "nats"]) == 0
    assert (tmp_path / "both.png").stat().st_size > 5000
    assert "both.png: loss, nats per token, 2 runs" in capsys.readouterr().out
    by_step, by_minute = drawn
    assert by_step["norm.impl=fused"] == by_step["norm.impl=torch"] == [(10, 4.0), (20, 3.0), (30, 2.0)]
    # 10 steps at 1 step/s, as before the first speed that was recorded, 10 at 1 step/s, and 10 at 2/3 steps/s
    for name, seconds in (("norm.impl=fused", (10, 20, 35)), ("norm.impl=torch", (20, 40, 70))):
        assert by_minute[name] == [(pytest.approx(s / 60), loss) for s, loss in zip(seconds, (4.0, 3.0, 2.0), strict=True)]


def test_runs_are_drawn_in_bits_per_byte_and_without_time_where_one_recorded_no_speed(tmp_path, drawn):
    curves = [read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", ["tokenizer=char"], bytes_per_token=1.0))]
    overlay(curves, tmp_path / "x.png")
    name = next(name for name in drawn[0] if "char" in name)
    assert drawn[0][name][0][1] == pytest.approx(4.0 / 0.6931471805599453) and len(drawn) == 2
    overlay(curves, tmp_path / "x.png", NATS)
    assert drawn[0][name][0][1] == 4.0
    overlay([curves[0], read_run(run(tmp_path / "c", ["seed=2"], speed=None))], tmp_path / "x.png")
    assert len(drawn) == 1


def test_the_legend_has_what_differs_and_folders_where_that_does_not_tell(tmp_path):
    given = {"a": [], "b": ["optim.clip_norm=0"], "c": ["optim.clip_norm=0"]}
    a, b, c = (read_run(run(tmp_path / name, ["seed=3", f"logging.name={name}", *more])) for name, more in given.items())
    assert names_of([a, b]) == ["optim.clip_norm=1.0", "optim.clip_norm=0.0"]
    assert names_of([a, b, c])[1] == f"{tmp_path}/b: optim.clip_norm=0.0"
    assert names_of([b, c]) == [f"{tmp_path}/b", f"{tmp_path}/c"]
    d = read_run(run(tmp_path / "d", ["model=gpt2", "norm.impl=torch", "model.dropout=0.1"]))
    assert names_of([a, d])[1].startswith(f"{tmp_path}/d: norm.impl=torch, ") and names_of([a, d])[1].endswith(", …")


def test_what_can_not_be_drawn_is_refused_by_name_and_left_out_where_others_can(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    old = run(tmp_path / "old", val=False)
    (old / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\n{"step": 2, "train/loss": 2.0}\n')
    for arguments, message in (
        (["nowhere"], "nowhere: no metrics.jsonl there"),
        (["old"], "old: it has recorded no bits per byte by step. Use other --unit and --by."),
        (["old", "--by", "tokens", "--unit", "nats"], "old: it has recorded no loss, nats per token by tokens."),
    ):
        assert plot.main([str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert message in capsys.readouterr().err
    run(tmp_path / "run")
    assert plot.main([str(tmp_path / "empty"), str(tmp_path / "run"), "--output", str(tmp_path / "x.png")]) == 0
    said = capsys.readouterr()
    assert "left out: " in said.err and "empty: no metrics.jsonl there" in said.err and "1 run\n" in said.out


NO_RECORDS = ["null", "1", "[]", "{}", '{"train/loss": 1.0}', '{"step": "1"}', '{"step": 1, "train/loss": "x"}', "[" * 9999]


def test_lines_of_metrics_that_are_no_record_are_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"step": 1, "train/loss": 2.0}', *NO_RECORDS, '{"step": 2}']))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": 2.0}, {"step": 2}]


def test_bits_per_byte_and_tokens_are_drawn_as_they_were_logged(tmp_path, drawn):
    overlay([read_run(run(tmp_path / "a"))], tmp_path / "x.png", BITS, "tokens")
    bits = {line.get("step"): line["train/bits_per_byte"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")[::2]}
    assert next(iter(drawn[0].values())) == [(1024 * step, loss) for step, loss in bits.items()]


def test_a_legend_of_long_names_is_inside_the_picture_and_a_single_evaluation_is_seen(tmp_path, monkeypatch):
    """The picture is as large as all that is drawn on it."""
    seen = []

    def check(figure, to):
        figure.canvas.draw()
        (legend,) = figure.legends
        box, page = legend.get_window_extent(), figure.bbox
        seen.append(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1)
        for axes in figure.axes:
            low, high = axes.get_ylim()
            assert all(low < y < high and line.get_marker() == "o" for line in axes.lines for y in line.get_ydata())

    monkeypatch.setattr("measure.plots.save_figure", check)
    for at in range(6):
        long = ["data=text", f"data.files=[{'a/long/path/to/a/file/of/text/' * 3}{at}.txt]", f"optim.lr=0.00{at + 1}"]
        folder = run(tmp_path / f"a_run_with_a_long_name_{at}", long)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join(lines[-2:]))
    overlay([read_run(folder) for folder in sorted(tmp_path.iterdir())], tmp_path / "x.png")
    assert seen == [True]
