"""Runs that follow each other in one engine are those of train.py."""

import pytest
import torch

from configs.schema import OptimKind
from study.arms import study_of
from tests.runs import composed, losses, train_here
from training.precision import MixedPrecision


@pytest.mark.parametrize("more", [[], ["model.dropout=0.1", "train.accumulation=2"], ["optim.kind=muon"]], ids=str)
def test_a_run_is_that_of_train_py(tiny, trained, tmp_path, more):
    keys = [*tiny, *more, "train.steps=10", "logging.every=1"]
    arm = study_of([*keys, "optim.lr=1e-3,3e-3", "seed=1,2"]).arms[0]
    summary, metrics = train_here([*keys, "optim.lr=3e-3", "seed=2"], tmp_path / "run")
    engine = trained(arm.at(3e-3, 2), 10)
    assert engine.losses.tolist() == losses(metrics)
    assert engine.grad_norms.tolist() == losses(metrics, "train/grad_norm")
    assert [engine.evaluate(), engine.evaluate()] == [summary.final.loss] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(OptimKind))
def test_a_run_of_replays_is_that_of_the_same_steps_without_a_graph(tiny, trained, kind):
    cfg, found = composed([*tiny, "norm.kind=rmsnorm"]), []
    cfg.optim.kind = kind
    engine = trained(cfg, 0, on=MixedPrecision(torch.device("cuda", 0), torch.bfloat16))
    for graph in (engine._graph, engine._graph, None):
        engine._graph = graph
        engine.restart()
        engine.advance(10)
        found.append(engine.losses[:10].tolist())
    evaluated, engine._val_graph = engine.evaluate(), None
    assert engine.evaluate() == pytest.approx(evaluated, rel=1e-3)
    replayed, again, eager = found
    assert replayed[-1] < replayed[0]
    assert again == pytest.approx(replayed, rel=1e-3) and eager == pytest.approx(replayed, rel=1e-3)
