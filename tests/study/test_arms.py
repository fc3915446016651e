"""The arms of a command line or a file."""

import pytest

from configs import ConfigError
from study.arms import FOLDER, study_of


def test_an_arm_is_what_is_swept_but_for_rate_and_seed():
    study = study_of(["norm.kind=layernorm,rmsnorm", "model.qk_norm=false,true", "optim.lr=1e-3,3e-3", "seed=range(1,4)"])
    assert len(study.arms) == 4 and study.rates == [1e-3, 3e-3] and study.seeds == [1, 2, 3]
    assert study.arms[-1].cfg.model.qk_norm and study.arms[-1].at(3e-3, 2).optim.lr == 3e-3
    alone = study_of(["experiment=gpt2_124m", "device=cpu", "seed=7,7"])
    assert (alone.rates, alone.seeds) == ([6e-4], [7])


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_named_study_can_run_and_its_keys_can_be_overridden(name):
    study = study_of([f"study={name}", "train.steps=10000", "optim.lr=2e-3"])
    assert len(study.arms) > 1 and study.seeds and study.words.keys() == {"claim", "source", "limits"}
    assert study.rates == [2e-3]
    assert all(arm.cfg.train.steps == 10000 for arm in study.arms)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["study=qk_nrom"], "Did you mean qk_norm"),
        (["optim.lr=1e-3,fast"], "optim.lr: .*fast"),
        (["compare.baseline=x", "norm.kind=layernorm,rmsnorm"], "no such arm"),
        (["compare.timing_cycles=3"], "takes 0, which times nothing, or 6 and more"),
        (["train.precision=fp16", "device=cpu"], "fp16"),
        (["parallel=fsdp"], "parallel"),
        (["seed=1,1001"], "seed=1001: compare.py takes seeds below 1001"),
        (["folder=a,b"], "folder: a comparison has one"),
    ],
)
def test_what_it_cant_compare_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        study_of(wrong)


def test_two_arms_of_a_file_have_two_names(tmp_path, monkeypatch):
    monkeypatch.setattr("study.arms.FOLDER", tmp_path)
    (tmp_path / "mine.yaml").write_text('claim: x\nsource: x\nlimits: x\narms:\n  a: ["norm.kind=layernorm,rmsnorm"]\n')
    with pytest.raises(ConfigError, match="a: two arms have this name"):
        study_of(["study=mine"])
