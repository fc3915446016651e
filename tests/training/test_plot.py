"""python -m training.plot: several runs in one picture."""

import json
import struct

import pytest
import yaml

import configs
from configs import ConfigError
from training import plot
from training.plot import BITS, NATS, minutes_of, names_of, overlay, read_run


def run(folder, overrides=(), bytes_per_token=2.0, speed=1024.0, val=True):
    """A folder as a run of 30 steps leaves it; 1024 tokens a step."""
    folder.mkdir(parents=True)
    cfg = configs.compose_only(list(overrides))
    (folder / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(cfg)))
    lines = []
    for step in (10, 20, 30):
        loss = 5 - step / 10
        lines.append({"step": step, "train/loss": loss} | ({"perf/tokens_per_s": speed} if speed and step > 10 else {}))
        if val:
            lines.append({"step": step, "val/loss": loss, "val/bits_per_byte": loss / 0.6931471805599453 / bytes_per_token})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def size(path):
    """Width and height of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


@pytest.fixture
def drawn(monkeypatch):
    """The lines of each panel of the last picture: label → points."""
    panels = []
    real = plot.pyplot.close

    def close(figure):
        panels[:] = [
            {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines} for axes in figure.axes
        ]
        real(figure)

    monkeypatch.setattr(plot.pyplot, "close", close)
    return panels


def test_runs_are_laid_over_one_another_by_step_and_by_time(tmp_path, drawn, capsys):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", ["norm.impl=torch"], speed=512.0)
    assert plot.main([str(a), str(b), "--output", str(tmp_path / "both.png")]) == 0
    assert size(tmp_path / "both.png")[0] > 1000 and "both.png: loss, nats per token, 2 runs" in capsys.readouterr().out
    by_step, by_minute = drawn
    losses = [4.0, 3.0, 2.0]
    assert by_step["norm.impl=fused"] == by_step["norm.impl=torch"] == list(zip((10, 20, 30), losses, strict=True))
    # 1024 tokens a step at 1024 and 512 tokens/s: a second and two
    assert by_minute["norm.impl=fused"] == [(pytest.approx(s / 60), y) for s, y in zip((10, 20, 30), losses, strict=True)]
    assert by_minute["norm.impl=torch"] == [(pytest.approx(2 * s / 60), y) for s, y in zip((10, 20, 30), losses, strict=True)]


def test_losses_of_different_tokenizers_are_drawn_in_bits_per_byte(tmp_path, drawn):
    curves = [read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", ["tokenizer=char"], bytes_per_token=1.0))]
    assert overlay(curves, tmp_path / "x.png") == BITS
    name = next(name for name in drawn[0] if "char" in name)
    assert drawn[0][name][0][1] == pytest.approx(4.0 / 0.6931471805599453)
    assert overlay(curves, tmp_path / "x.png", NATS) == NATS and drawn[0][name][0][1] == 4.0
    assert overlay(curves[:1], tmp_path / "x.png") == NATS and len(drawn) == 2
    overlay([curves[0], read_run(run(tmp_path / "c", ["seed=2"], speed=None))], tmp_path / "x.png")
    assert len(drawn) == 1, "a run that recorded no speed leaves the panel of time out"


def test_the_legend_has_what_differs_and_folders_where_that_does_not_tell(tmp_path):
    a, b, c = (
        read_run(run(tmp_path / name, [*overrides, f"logging.name={name}"]))
        for name, overrides in (
            ("a", ["seed=3"]),
            ("b", ["seed=3", "optim.clip_norm=0"]),
            ("c", ["seed=3", "optim.clip_norm=0"]),
        )
    )
    assert names_of([a, b]) == ["optim.clip_norm=1.0", "optim.clip_norm=0.0"]
    assert names_of([a, b, c]) == ["optim.clip_norm=1.0", "b: optim.clip_norm=0.0", "c: optim.clip_norm=0.0"]
    assert names_of([b, c]) == ["b", "c"] and names_of([a]) == ["a"]
    d = read_run(run(tmp_path / "d", ["model=gpt2", "norm.impl=torch", "model.dropout=0.1"]))
    assert names_of([a, d])[1].startswith("d: norm.impl=torch, ") and names_of([a, d])[1].endswith(", …")


def test_time_is_that_of_the_steps_between_the_lines_at_their_recorded_speed():
    lines = [{"step": 10}, {"step": 20, "perf/tokens_per_s": 100.0}, {"step": 20}, {"step": 30, "perf/tokens_per_s": 50.0}]
    assert minutes_of(lines, 60) == {10: pytest.approx(0.1), 20: pytest.approx(0.2), 30: pytest.approx(0.4)}
    assert minutes_of([{"step": 10}], 60) == {}


def test_what_can_not_be_drawn_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert plot.main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert plot.main([str(tmp_path / "empty")]) == 2
    assert "empty: no run has logged anything there (metrics.jsonl is missing)" in capsys.readouterr().err
    run(tmp_path / "sweep" / "0_seed-1")
    assert plot.main([str(tmp_path / "sweep")]) == 2
    assert f"Name those: {tmp_path}/sweep/*." in capsys.readouterr().err


def test_all_that_is_in_a_sweeps_folder_may_be_given(tmp_path, drawn):
    run(tmp_path / "0_seed-1")
    run(tmp_path / "1_seed-2", ["seed=2"])
    (tmp_path / "multirun.yaml").write_text("hydra: {}\n")  # Hydra's
    assert plot.main([*map(str, tmp_path.glob("*")), "--output", str(tmp_path / "x.png")]) == 0
    assert drawn[0].keys() >= {"seed=1", "seed=2"}
    assert plot.main([str(tmp_path / "multirun.yaml")]) == 2
    with pytest.raises(ConfigError, match=r"b: no validation loss yet.*--unit nats"):
        overlay([read_run(run(tmp_path / "a")), read_run(run(tmp_path / "b", val=False))], tmp_path / "x.png", BITS)
