"""The arms of a command line or a file."""

import pytest

import compare
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
    ],
)
def test_what_it_cant_compare_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        study_of(wrong)


def test_one_arm_at_one_rate_is_refused_with_what_to_give(capsys):
    assert compare.main(["device=cpu", "seed=1,2"]) == 2
    assert "nothing to compare. Give several values of a key and of the learning rate, such as" in capsys.readouterr().err


def test_a_misspelt_key_beside_several_values_is_what_the_error_is_about(capsys):
    assert compare.main(["device=cpu", "norm.kind=layernorm,rmsnorm", "compare.frsh=2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: compare.frsh: no such key. Did you mean compare.fresh?") and "compare.py --help" in said


MINE = """# @package compare
arguments: [optim.lr=1e-3, "seed=1,2"]
baseline: b
arms:
  a: ["norm.kind=%s"]
  b: [norm.kind=dyt]
"""


def test_a_study_in_a_folder_of_ones_own_is_an_option_and_two_arms_of_it_have_two_names(tmp_path, monkeypatch, capsys):
    studies = []
    monkeypatch.setattr(compare, "compare", lambda study, *_: studies.append(study))
    (tmp_path / "study").mkdir()
    for name, kinds in (("mine", "rmsnorm"), ("same", "rmsnorm,layernorm"), ("rated", 'rmsnorm", "optim.lr=0.1')):
        (tmp_path / "study" / f"{name}.yaml").write_text(MINE % kinds)
    command = ["--config-dir", str(tmp_path), f"folder={tmp_path / 'run'}", "device=cpu", "optim.lr=1e-2"]
    assert compare.main([*command, "study=mine"]) == 0
    assert [arm.name for arm in studies[0].arms] == ["a", "b"] and studies[0].baseline.name == "b"
    assert (studies[0].rates, studies[0].seeds) == ([1e-2], [1, 2])
    assert compare.main([*command, "study=same"]) == 2 and "a: two arms have this name" in capsys.readouterr().err
    assert compare.main([*command, "study=rated"]) == 2
    assert "optim.lr in the arm a: every arm is trained at all rates" in capsys.readouterr().err
