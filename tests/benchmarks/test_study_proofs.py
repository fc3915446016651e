"""The proofs of compare.py at toy size."""

import pytest
import torch

from benchmarks import study_proofs
from study.engine import Engine
from tests.runs import composed, precision


def test_it_records_every_study_and_prints_a_table(tiny, recorded, monkeypatch):
    monkeypatch.setattr(study_proofs, "SEEDS", 3)
    file, printed = recorded(study_proofs, "--device", "cpu", "--studies", "1", *tiny, "train.steps=6", "eval.batches=2")
    records = {one["proof"]: one for one in file["records"]}
    assert list(records) == ["aa", "shifted", "planted", "handicap"] and "called different" in printed
    shift = records["shifted"]["difference"]["median"] - records["aa"]["difference"]["median"]
    assert shift == pytest.approx(study_proofs.SHIFT)
    assert records["handicap"]["difference"]["median"] != records["planted"]["difference"]["median"] - study_proofs.SHIFT


def test_half_of_the_norm_weights_stay_frozen_and_the_other_half_learns(tiny):
    from data import load_corpus

    cfg = composed([*tiny, "norm.kind=rmsnorm", "train.steps=5"])
    corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    engine = Engine(cfg, precision(torch.float32), corpus, study_proofs.half_frozen)
    for _ in range(2):  # and after a reset
        engine.begin(cfg)
        engine.advance(5)
        weights = [p for name, p in engine.model.named_parameters() if "norm" in name]
        assert len(weights) == 5
        for weight in weights:
            assert torch.equal(weight[:16], torch.full((16,), study_proofs.FROZEN)) and (weight[16:] != 1).all()


def test_a_study_is_drawn_of_runs_that_no_other_has():
    n = study_proofs.SEEDS
    losses = [float(number) for number in range(6 * n)]
    found = [one["difference"]["median"] for one in study_proofs.studies_of(losses, 2)]
    # the first n of 3 n numbers − the mean of the others
    assert found == pytest.approx([-1.5 * n] * 2 + [-1.5 * n + study_proofs.SHIFT] * 2)
