"""A ladder, with drawn losses in place of training, and with training of tiny models."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import compare
from configs.schema import ModelConfig, NormConfig, NormKind
from model import GPT
from study import ladder
from study.arms import FOLDER, Arm, Study
from study.config import Config
from study.ladder import law, predicted
from study.runs import FRESH, SEARCH, Found, Result
from tests.runs import read_json

SIZES = {"2M": (4, 128, 1200), "4M": (6, 192, 2600), "8M": (8, 256, 5200), "20M": (10, 384, 12700)}


@pytest.fixture(scope="module")
def studies():
    """By size the study, and by arm the number of its parameters."""
    found = {}
    for size, (layers, width, steps) in SIZES.items():
        arms = [
            Arm(name, Config(model=ModelConfig(layers=layers, width=width, qk_norm="QK" in name), norm=NormConfig(kind=kind)))
            for name, kind in (("LN", NormKind.layernorm), ("RMS", NormKind.rmsnorm), ("RMS + QK", NormKind.rmsnorm))
        ]
        for arm in arms:
            arm.cfg.train.steps, arm.cfg.compare.fresh = steps, 4
        with torch.device("meta"):
            counts = {arm.name: GPT(arm.cfg.model, arm.cfg.norm, 512, arm.cfg.loss).parameter_count() for arm in arms}
        found[size] = Study(arms, [1e-3, 3e-3, 1e-2], [1], {}), counts
    return found


@pytest.fixture
def drawn(studies):
    """drawn(gain): the runs of all sizes; the loss follows a law, and the second arm is better by `gain` at the last size."""

    def drawn(gain=0.0):
        made = {}
        for size, (study, counts) in studies.items():
            found = Found()

            def train(arm, stage, rates, seeds, until=None, study=study, found=found, size=size, counts=counts):
                width, steps, count = arm.cfg.model.width, arm.cfg.train.steps, counts[arm.name]
                for seed in seeds:
                    for rate in rates:
                        beside = 0.05 * math.log(rate * width / (128 * 3e-3)) ** 2
                        loss = 1 + (count * steps / 1e9) ** -0.2 + beside + 1e-4 * (seed % 7)
                        loss -= gain * (arm is study.arms[1] and size == "20M") - 0.01 * (arm is study.arms[1])
                        found.add(Result(arm.name, stage, rate, seed, steps, [[0, 9.0], [until or steps, loss]]).__dict__)

            corpus = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=512))
            made[size] = SimpleNamespace(study=study, found=found, train=train, time=lambda arm: None, corpus=corpus)
        return made

    return drawn


def test_rates_are_carried_by_the_width_and_the_last_size_is_one_run_that_the_others_predict(drawn):
    found = ladder.climb(runs := drawn())
    rungs = found["LN"]
    assert [one.rate for one in rungs] == pytest.approx([3e-3, 3e-3 * 128 / 192, 3e-3 / 2, 3e-3 / 3], rel=0.01)
    assert [len(one.losses) for one in rungs] == [4, 4, 4, 1] and [one.size for one in rungs] == list(runs)
    assert [one.rate for one in runs["20M"].found.of("LN", FRESH)] == [rungs[-1].rate]
    first = runs["2M"]
    added = [run for run in first.found.results if run.stage == SEARCH and run.rate not in first.study.rates]
    made = sum(len(of.found.results) for of in runs.values())
    assert ladder.least_runs([of.study for of in runs.values()]) == made - len(added)
    assert rungs[-1].compute > 30 * rungs[0].compute and all(more > 0 for more in rungs[2].beside.values())
    said = ladder.report(found)
    assert "the lowest loss first, is LN, RMS + QK, RMS: as at the size before" in said.replace("\n  ", " ")
    assert said.count("within the interval") == 3 and "the rule of rates" not in said


def test_an_order_that_turns_and_a_rate_that_does_not_carry_are_told(drawn):
    found = ladder.climb(drawn(gain=0.2))
    found["LN"][2].beside[7e-4] = -0.02
    said = " ".join(ladder.report(found).split())
    assert "is RMS, LN, RMS + QK: at the size before it is LN, RMS + QK, RMS." in said
    assert "LN: at 8M a rate of 0.0007 is better by 0.0200, so the rule of rates does not hold." in said
    assert "outside of the interval" in said


def test_it_trains_every_size_in_a_folder_of_its_own(tiny, tmp_path):
    text = (FOLDER / "ladder.yaml").read_text().split("arguments:")[0]
    sizes = "".join(f"  '{n}': [model.width={16 * n}, train.steps={4 * n}]\n" for n in (1, 2, 3, 4))
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "small.yaml").write_text(
        f'{text}arguments: ["optim.lr=1e-3,3e-3", eval.every=0]\narms:\n  a: []\nsizes:\n{sizes}'
    )
    command = [f"--config-dir={tmp_path}", "study=small", *tiny, "compare.fresh=2", "eval.batches=1", "model.heads=2"]
    command += [f"folder={tmp_path}/ladder"]
    command = [key for key in command if not key.startswith(("model.width", "train.steps", "optim.lr", "eval.every"))]
    assert compare.main(command) == 0
    record = read_json(tmp_path / "ladder" / "report.json")
    assert "study/ladder.py" in record["code"]["modules"] and record["environment"]["versions"]["torch"]
    assert all([rung["size"] for rung in of] == ["1", "2", "3", "4"] for of in record["ladder"].values())
    assert "predicted" in (tmp_path / "ladder" / "ladder.md").read_text()
    assert (tmp_path / "ladder" / "4" / "runs.jsonl").read_text().count('"evaluated"') == 1


COMPUTE = np.array([1e14, 4e14, 1.6e15])


def losses_of(compute, floor=1.2, slope=0.8, exponent=0.3):
    return floor + slope * (compute / COMPUTE[0]) ** -exponent


def test_the_law_is_found_of_several_lines_at_once():
    lines = np.stack([losses_of(COMPUTE), losses_of(COMPUTE, 1.0, 0.5, 0.15), np.full(3, 2.0)])
    floor, slope, exponent = law(COMPUTE, lines)
    assert floor == pytest.approx([1.2, 1.0, 2.0], abs=0.02) and slope == pytest.approx([0.8, 0.5, 0.0], abs=0.02)
    assert exponent[:2] == pytest.approx([0.3, 0.15], abs=0.011)


def test_a_prediction_covers_what_is_drawn():
    draw, held = np.random.default_rng(0), 0
    for _ in range(30):
        told = predicted(COMPUTE, [losses_of(c) + draw.normal(0, 0.005, 8) for c in COMPUTE], 4 * COMPUTE[-1])
        held += told.holds(losses_of(4 * COMPUTE[-1]) + draw.normal(0, 0.005))
    assert held >= 26
    assert told.high - told.low < 0.1
