"""python -m training.plot: several runs in one picture."""

import json

import pytest
import yaml

import configs
from training import plot
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
        lines.append({"step": step, "train/loss": loss} | rate)
        if val:
            lines.append({"step": step, "val/loss": loss, "val/bits_per_byte": loss / 0.6931471805599453 / bytes_per_token})
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
    assert plot.main([*map(str, sorted(tmp_path.glob("*"))), "--output", str(tmp_path / "both.png")]) == 0
    assert (tmp_path / "both.png").stat().st_size > 5000
    assert "both.png: loss, nats per token, 2 runs" in capsys.readouterr().out
    by_step, by_minute = drawn
    assert by_step["norm.impl=fused"] == by_step["norm.impl=torch"] == [(10, 4.0), (20, 3.0), (30, 2.0)]
    # 10 steps at 1 step/s, as before the first speed that was recorded, 10 at 1 step/s, and 10 at 2/3 steps/s
    for name, seconds in (("norm.impl=fused", (10, 20, 35)), ("norm.impl=torch", (20, 40, 70))):
        assert by_minute[name] == [(pytest.approx(s / 60), loss) for s, loss in zip(seconds, (4.0, 3.0, 2.0), strict=True)]


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
    given = {"a": [], "b": ["optim.clip_norm=0"], "c": ["optim.clip_norm=0"]}
    a, b, c = (read_run(run(tmp_path / name, ["seed=3", f"logging.name={name}", *more])) for name, more in given.items())
    assert names_of([a, b]) == ["optim.clip_norm=1.0", "optim.clip_norm=0.0"]
    assert names_of([a, b, c]) == ["optim.clip_norm=1.0", "b: optim.clip_norm=0.0", "c: optim.clip_norm=0.0"]
    assert names_of([b, c]) == ["b", "c"] and names_of([a]) == ["a"]
    d = read_run(run(tmp_path / "d", ["model=gpt2", "norm.impl=torch", "model.dropout=0.1"]))
    assert names_of([a, d])[1].startswith("d: norm.impl=torch, ") and names_of([a, d])[1].endswith(", …")


def test_what_can_not_be_drawn_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    run(tmp_path / "sweep" / "0_seed-1")
    run(tmp_path / "new", val=False)
    for arguments, message in (
        (["nowhere"], "nowhere: no such folder"),
        (["empty"], "empty: no run has logged anything there (metrics.jsonl is missing)"),
        (["sweep"], f"Name those: {tmp_path}/sweep/*."),
        (["new", "--unit", "bits"], "new: no validation loss yet"),
        (["multirun.yaml"], "multirun.yaml: no such folder"),
    ):
        assert plot.main([str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert message in capsys.readouterr().err
