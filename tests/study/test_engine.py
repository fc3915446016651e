"""Runs that follow each other in one engine are those of train.py."""

import pytest
import torch

from configs.schema import OptimKind
from study.arms import study_of
from tests.runs import composed, losses, train_here
from training.precision import MixedPrecision


@pytest.mark.parametrize("more", [["model.dropout=0.1", "train.accumulation=2"], ["optim.kind=muon"]], ids=str)
def test_a_run_is_that_of_train_py(tiny, trained, tmp_path, more):
    keys = [*tiny, *more, "train.steps=10", "logging.every=1"]
    arm = study_of([*keys, "optim.lr=1e-3,3e-3", "seed=1,2"]).arms[0]
    summary, metrics = train_here([*keys, "optim.lr=3e-3", "seed=2"], tmp_path / "run")
    engine = trained(arm.at(3e-3, 2), 10)
    assert engine.losses.tolist() == losses(metrics)
    assert engine.grad_norms.tolist() == losses(metrics, "train/grad_norm")
    assert [engine.evaluation().loss, engine.evaluation().loss] == [summary.final.loss] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(OptimKind))
def test_runs_of_one_graph_are_those_of_the_same_steps_without(tiny, trained, kind, deterministic):
    cfg, found = composed([*tiny, "norm.kind=rmsnorm"]), []
    cfg.optim.kind = kind
    for graph in ("auto", False):
        cfg.train.graph = graph
        engine = trained(cfg, 10, on=MixedPrecision(torch.device("cuda", 0), torch.bfloat16))
        assert engine.update.graph == (graph == "auto")
        found.append([*engine.losses[:10].tolist(), engine.evaluation().loss])
        engine.restart()
        engine.advance(10)
        assert [*engine.losses[:10].tolist(), engine.evaluation().loss] == found[-1]
    assert found[0] == found[1] and found[0][9] < found[0][0]
