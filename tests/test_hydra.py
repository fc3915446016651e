"""What people know of Hydra works in train.py: its options, folders, sweeps, launchers, and configs of their own."""

import importlib.util
import re

import pytest
from hydra.core.hydra_config import HydraConfig

import compare
import configs
import train
from configs import compose
from measure.files import StorageError
from tests.runs import read_json, run_folders
from training.metrics import NonFiniteError
from training.start import job

OWN = {"experiment": "# @package _global_\ndefaults:\n  - override /model: mine\noptim: {lr: 0.5}\n", "model": "layers: 3\n"}


@pytest.fixture
def asked(monkeypatch, here):
    """The jobs that commands ask for: the folder of each, and its config. They are not run."""
    jobs = []
    monkeypatch.setattr(
        train, "job", lambda _, cfg: jobs.append((HydraConfig.get().runtime.output_dir, compose.typed(cfg, configs.Config)))
    )
    return jobs


@pytest.fixture
def own(tmp_path):
    """A folder with an option `mine` of two groups."""
    for group, text in OWN.items():
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / "mine.yaml").write_text(text)
    return tmp_path / "own"


def test_a_sweep_is_every_combination_each_with_its_config_and_its_folder(asked, tmp_path):
    given = ["norm.impl=fused,torch", "-m", "seed=range(1,3)", "data.files=[a/b c]", "folder=a/b", "model=tiny", "device=cpu"]
    assert train.main(["data=text", *given]) == 0
    assert [(cfg.norm.impl, cfg.seed) for _, cfg in asked] == [("fused", 1), ("fused", 2), ("torch", 1), ("torch", 2)]
    folders = [folder.removeprefix(f"{tmp_path}/") for folder, _ in asked]
    assert folders[1:3] == ["a/b/1_norm.impl-fused_seed-2", "a/b/2_norm.impl-torch_seed-1"]
    assert train.main(["-m", "logging.name=a/b,'c d'", "device=cpu", "hydra.sweep.dir=there"]) == 0
    assert asked[4][0] == f"{tmp_path}/there/0_logging.name-a-b"
    assert train.main(["-m", "model=glob(gpt2*,exclude=gpt2)", "device=cpu"]) == 0
    assert [cfg.model.layers for _, cfg in asked[6:]] == [36, 24, 48], "large, medium, xl"


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        ("experiment=shakespeare_char norm.impl=torch", r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_shakespeare_nanogpt_char_torch"),
        ("folder=a/b", "a/b"),
        ("hydra.run.dir=c", "c"),
        ("data=tinystories norm.impl=torch", "runs/[^/]*_tinystories_tiny_torch"),
        ("logging.name='a/b c' resume=runs/2026-01-02_03-04-05_mine", "runs/[^/_]*_[^/_]*_a-b-c"),
        ("resume=runs/2026-01-02_03-04-05_resumed_mine/best", "runs/[^/_]*_[^/_]*_resumed_mine"),
        ("resume=runs/2026-01-02_03-04-05_mine/checkpoints/step_00000200", "runs/[^/_]*_[^/_]*_resumed_mine"),
    ],
)
def test_the_folder_of_a_run_is_named_by_hydra_or_by_its_key(asked, tmp_path, overrides, folder):
    assert train.main(["device=cpu", *re.split(r" (?=\w+[.=])", overrides)]) == 0
    assert re.fullmatch(f"{tmp_path}/{folder}", asked[0][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-m norm.impl=fused,toch", "norm.impl: Invalid value 'toch', expected one of [fused, torch, compiled"),
        ("-m seed=1,2 model.heads=4,3", "(in the job device=cpu seed=1 model.heads=3)"),
        ("-m seed=1,2 norm.alpha=1", "norm.alpha is read only with norm.kind=dyt,derf; here norm.kind=layernorm"),
        ("-m optim.lr=interval(0,1)", "BasicSweeper does not support sweep type : INTERVAL"),
        ("hydra.run.di=a", "hydra.run.di: Key 'di' not in 'RunDir'."),
        ("--train.steps=3", "error: unrecognized arguments: --train.steps=3"),
        ("--cfg job seed=1,2", "To sweep over it, add --multirun"),
        ("-m --cfg job", "Only one of --run, --multirun, --cfg"),
        ("study=first", "Could not override 'study'. No match in the defaults list."),
        ("--config-name=none", "Cannot find primary config 'none'."),
        ("resume=atuo", "error: resume=atuo: no such run. Did you mean auto?"),
        ("hydra.run.dir=mine model.heads=3", "model.heads=3 does not divide"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(here, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("trained"))
    assert train.main(["device=cpu", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert "error: " in said and message in said and "Traceback" not in said
    assert [*here.iterdir()] in ([], [here / "runs"]) and not run_folders(here)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("--cfg hydra", "_target_: hydra_plugins.prenorm_sweepers.Checked"),
        ("--cfg job --package model model=gpt2", "layers: 12"),
        ("--shell-completion query=bash", "model=gpt2_large model=gpt2_medium"),
    ],
)
def test_hydras_options_are_there(asked, capsys, monkeypatch, tmp_path, arguments, part):
    monkeypatch.setenv("COMP_LINE", "train.py norm.impl=torch model=gpt2_")
    monkeypatch.setenv("COMP_POINT", "")
    assert train.main(arguments.split()) == 0
    assert part in capsys.readouterr().out and not asked and not list(tmp_path.iterdir())


def test_options_of_a_folder_of_ones_own_stand_beside_ours_and_their_mistakes_are_named(asked, own, capsys):
    command = ["--config-dir", str(own), "device=cpu"]
    assert train.main([*command, "experiment=mine", "model.heads=2"]) == 0
    [(folder, cfg)] = asked
    assert (cfg.model.layers, cfg.optim.lr, cfg.model.heads) == (3, 0.5, 2) and folder.endswith("_shakespeare_mine_fused")
    assert train.main([*command, "experiment=mnie"]) == 2
    (own / "model" / "wrong.yaml").write_text("layer: 3\n")
    assert train.main([*command, "model=wrong"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean mine?" in said
    assert "model.layer: no such key. Did you mean model.layers?" in said
    (own / "study").mkdir()
    (own / "study" / "ours.yaml").write_text("# @package compare\nclaim: It is so.\n")
    assert compare.main(["--help", *command[:2]]) == 0
    assert re.search(r"study=ours +It is so\.\n", capsys.readouterr().out)
    assert train.main(["device=cpu", "model=tiny"]) == 0 and configs.load(["device=cpu"]).model.layers == 4


def test_hydras_variable_adds_the_traceback_to_an_error(asked, monkeypatch, capsys):
    for value in ("", "1"):
        monkeypatch.setenv("HYDRA_FULL_ERROR", value)
        assert train.main(["norm.imp=torch"]) == 2
        said = capsys.readouterr().err
        assert ("Traceback" in said) is bool(value) and "error: norm.imp: no such key" in said


def test_a_sweeper_gets_the_last_validation_loss_and_a_job_that_raises_ends_no_other(tiny, here, monkeypatch, capfd):
    losses, original = [], train.train
    monkeypatch.setattr(train, "job", lambda *given: losses.append(job(*given)))
    monkeypatch.setattr(train, "train", lambda cfg, *rest: 1 / (cfg.seed - 1) and original(cfg, *rest))
    with pytest.raises(ZeroDivisionError):
        train.main([*tiny, "train.steps=3", "-m", "seed=1,2", "folder=sweep"])
    assert losses == [read_json(here / "sweep" / "1_seed-2" / "summary.json")["final"]["loss"]]
    assert re.search(r"Error executing job with overrides: \[.*'seed=1'", capfd.readouterr().err)


def test_a_failed_job_ends_no_later_batch_and_the_exit_code_is_that_of_the_first_that_failed(tiny, here, monkeypatch, capsys):
    tried, errors = [], {1: NonFiniteError("loss is NaN", 1), 2: configs.ConfigError("no"), 3: StorageError("no room")}

    def fail(cfg, run, *_):
        tried.append(run.folder.name)
        raise errors[cfg.seed]

    monkeypatch.setattr(train, "train", fail)
    assert train.main([*tiny, "-m", "seed=1,2,3", "hydra.sweeper.max_batch_size=1"]) == 1
    assert tried == ["0_seed-1", "1_seed-2", "2_seed-3"]
    said = capsys.readouterr().err
    assert "stopped: loss is NaN" in said and "error: no\n" in said and "stopped: no room\n" in said


@pytest.mark.skipif(not importlib.util.find_spec("joblib"), reason="needs hydra-joblib-launcher")
def test_a_launcher_that_is_installed_runs_the_jobs(tiny, here, capfd):
    sweep = ["-m", "seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "train.steps=3", "sample.prompt=the,ROMEO"]
    assert train.main([*tiny, *sweep]) == 2
    said = capfd.readouterr().err
    assert "no token for 'E'" in said and "Traceback" not in said, said
    folders = run_folders(here)
    assert [folder.name for folder in folders] == [f"{2 * i}_sample.prompt-the_seed-{i + 1}" for i in range(2)]
    assert len({read_json(folder / "summary.json")["final"]["loss"] for folder in folders}) == 2
