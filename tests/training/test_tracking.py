"""W&B: its variables and the config, a server that doesn't answer, and the job of a W&B agent."""

import time

import pytest
import torch
from wandb.sdk import wandb_setup

from configs import ConfigError
from configs.schema import LoggingConfig, WandbMode
from data.tokenizer import char_tokenizer
from tests.runs import composed
from training.run import Start, open_run
from training.tracking import Tracker, with_defaults

ONLINE, OFFLINE, DISABLED = WandbMode.online, WandbMode.offline, WandbMode.disabled
KEY = "0" * 40
GIVEN = {"mode": "offline", "project": "p", "entity": "e", "run_group": "g", "name": "n", "tags": "a,b"}
NAMED = {"group": None, "name": "n", "tags": [], "config": {}, "run_id": "r1"}
pytestmark = pytest.mark.usefixtures("own_wandb")


def test_online_without_a_key_is_what_the_config_says_and_a_key_in_netrc_counts_for_its_own_host_only(tmp_path, monkeypatch):
    def mode(**keys):
        filled, facts = with_defaults(LoggingConfig(wandb=ONLINE, **keys))
        assert (filled.wandb is ONLINE) == (len(facts) == 1), "it says why"
        return filled.wandb

    assert [mode(without_key=other) for other in (OFFLINE, DISABLED)] == [OFFLINE, DISABLED]
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert mode() == ONLINE
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode() == OFFLINE
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert mode() == ONLINE


def test_the_config_decides_then_a_variable_then_a_default(monkeypatch):
    assert with_defaults(LoggingConfig()) == (LoggingConfig(wandb=OFFLINE, project="prenorm", tags=[]), ["project prenorm"])
    for name, value in GIVEN.items():
        monkeypatch.setenv(f"WANDB_{name.upper()}", value)
    wanted = LoggingConfig(wandb=OFFLINE, project="p", entity="e", group="g", name="n", tags=["a", "b"])
    assert with_defaults(LoggingConfig()) == (wanted, ["project p"])
    own = LoggingConfig(wandb=OFFLINE, project="mine", entity="me", group="ours", name="this", tags=[])
    assert with_defaults(own) == (own, ["project mine"])


@pytest.mark.parametrize(("name", "value", "says"), [("MODE", "foo", "mode: "), ("API_KEY", " secret", "API key (?!.*secret)")])
def test_a_wrong_value_is_refused_before_anything_starts_and_a_key_is_never_shown(monkeypatch, name, value, says):
    monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.raises(ConfigError, match=f"^W&B refuses a key of logging, or a variable WANDB_…: {says}"):
        with_defaults(LoggingConfig())
    assert with_defaults(LoggingConfig(wandb=DISABLED))[0].wandb is DISABLED, "what is not used may be wrong"


def test_a_server_that_does_not_answer_makes_the_run_go_on_as_without_a_key(monkeypatch, tmp_path):
    closed = {"API_KEY": KEY, "BASE_URL": "http://127.0.0.1:9", "INIT_TIMEOUT": "1"}  # nobody listens there
    for name, value in closed.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = Tracker(with_defaults(LoggingConfig(wandb=ONLINE))[0], tmp_path / "run", **NAMED)
    run.log({"a": 1}, step=1)
    run.finish(0)
    assert run.mode is OFFLINE and len(list(tmp_path.glob("run/wandb/offline-run-*-r1"))) == 1
    assert run.note.startswith("online start failed: ")


def test_a_run_goes_on_where_wandbs_process_dies(tmp_path, capsys):
    run = Tracker(with_defaults(LoggingConfig())[0], tmp_path, **NAMED)
    core = wandb_setup.singleton()._connection._proc._process
    core.kill()
    core.wait()
    for step in range(1, 100):
        run.log({"a": 1}, step)
        time.sleep(0.01)
    run.finish(0)
    assert capsys.readouterr().err.count("W&B failed and is left out from here on: ") == 1


def test_a_job_of_an_agent_is_its_run_in_the_sweeps_project_and_one_run(monkeypatch, tmp_path):
    for name, value in {"SWEEP_ID": "s1", "RUN_ID": "r1", "PROJECT": "p", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    cfg = composed(["logging.project=mine", "logging.entity=me"])
    with open_run(Start(cfg, tmp_path / "run"), torch.device("cpu")) as run:
        run.start({}, {"parameters": 7}, char_tokenizer({"a"}))
        theirs = run.tracker._run
        assert (theirs.id, theirs.project, theirs.settings.sweep_id) == ("r1", "p", "s1")
    opened = open_run(Start(cfg, tmp_path / "sweep"), torch.device("cpu"), "a_sweep")
    with pytest.raises(ConfigError, match="job of a W&B agent is one run"), opened as run:
        run.start({}, {}, char_tokenizer({"a"}))
