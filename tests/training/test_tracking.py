"""W&B: its variables and the config, a server that doesn't answer, and the job of a W&B agent."""

import signal
import socket
import time
from contextlib import closing

import pytest
import torch
from wandb.sdk import wandb_setup

from configs import ConfigError
from configs.schema import LoggingConfig, WandbMode
from data.tokenizer import char_tokenizer
from tests.forks import Command
from tests.runs import composed, wait_until
from training.resume import Start
from training.run import open_run
from training.tracking import Tracker, settle

ONLINE, OFFLINE, DISABLED = WandbMode.online, WandbMode.offline, WandbMode.disabled
KEY = "0" * 40
GIVEN = {"mode": "dryrun", "project": "p", "entity": "e", "run_group": "g", "name": "n", "tags": "a,b"}
NAMED = {"group": None, "name": "n", "tags": [], "config": {}, "run_id": "r1"}
pytestmark = pytest.mark.usefixtures("own_wandb")


def test_online_without_a_key_is_what_the_config_says_and_a_key_in_netrc_counts_for_its_own_host_only(tmp_path, monkeypatch):
    def settled(**keys):
        mode, facts = settle(LoggingConfig(wandb=ONLINE, **keys))
        return mode.wandb, len(facts) > 1 and "no API key" in facts[1]

    netrc = tmp_path / "netrc"
    netrc.write_text("nonsense nonsense")
    assert [settled(without_key=mode) for mode in (OFFLINE, DISABLED)] == [(OFFLINE, True), (DISABLED, True)]
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    netrc.chmod(0o600)
    assert settled() == (ONLINE, False)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert settled() == (OFFLINE, True)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert settled() == (ONLINE, False)


def test_the_config_decides_then_a_variable_then_a_default(monkeypatch):
    assert settle(LoggingConfig()) == (LoggingConfig(wandb=OFFLINE, project="prenorm", tags=[]), ["project prenorm"])
    for name, value in GIVEN.items():
        monkeypatch.setenv(f"WANDB_{name.upper()}", value)
    wanted = LoggingConfig(wandb=OFFLINE, project="p", entity="e", group="g", name="n", tags=["a", "b"])
    assert settle(LoggingConfig()) == (wanted, ["project p"])
    own = LoggingConfig(wandb=OFFLINE, project="mine", entity="me", group="ours", name="this", tags=[])
    assert settle(own) == (own, ["project mine"])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MODE", "foo", r"mode \(logging\.wandb\): Input should be 'online', 'offline'"),
        ("TAGS", "a,,b", r"run_tags \(logging\.tags\): .*between 1 and 64 characters"),
        ("INIT_TIMEOUT", "soon", "init_timeout: Input should be a valid number"),
        ("API_KEY", " secret", "API key (?!.*secret)"),
    ],
)
def test_a_wrong_value_is_refused_in_words_before_anything_starts_and_a_key_is_never_shown(monkeypatch, name, value, says):
    monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.raises(ConfigError, match=f"^W&B refuses a key of logging, or a variable WANDB_…: {says}"):
        settle(LoggingConfig())
    assert settle(LoggingConfig(wandb=DISABLED))[0].wandb is DISABLED, "what is not used may be wrong"


def test_a_server_that_does_not_answer_makes_the_run_go_on_as_without_a_key(monkeypatch, tmp_path):
    closed = {"API_KEY": KEY, "BASE_URL": "http://127.0.0.1:9", "INIT_TIMEOUT": "1"}  # nobody listens there
    for name, value in closed.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = Tracker(settle(LoggingConfig(wandb=ONLINE))[0], tmp_path / "run", **NAMED)
    run.log({"a": 1}, step=1)
    run.finish(0)
    assert run.mode is OFFLINE and len(list(tmp_path.glob("run/wandb/offline-run-*-r1"))) == 1
    assert run.note.startswith("online start failed: ") and "connection refused" in run.note


def test_a_run_goes_on_where_wandbs_process_dies(tmp_path, capsys):
    run = Tracker(settle(LoggingConfig())[0], tmp_path, **NAMED)
    core = wandb_setup.singleton()._connection._proc._process
    core.kill()
    core.wait()
    for step in range(1, 100):
        run.log({"a": 1}, step)
        time.sleep(0.01)
    run.summarise({"a": 1})
    run.finish(0)
    assert capsys.readouterr().err.count("W&B failed and is left out from here on: ") == 1


def test_a_signal_while_a_server_that_never_answers_is_waited_for_ends_the_run_at_once(tiny, tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        reached = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{mute.getsockname()[1]}"}
        process = Command([*tiny, "logging.wandb=online"], tmp_path, **reached, WANDB_INIT_TIMEOUT="600")
        wait_until(process, lambda: any(tmp_path.glob("runs/*/wandb/run-*/logs/debug-internal.log")))
        process.send_signal(signal.SIGTERM)
        done = process.finish(within=20)  # W&B's own process goes on for 30 s
    assert done.returncode == 143 and "Traceback" not in done.stderr, done.stderr


def start(run):
    run.start({}, {"parameters": 7}, char_tokenizer({"a"}))


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """The environment that a W&B agent gives a job of its sweep."""
    parameters = tmp_path / "wandb" / "sweep-s1" / "config-r1.yaml"
    parameters.parent.mkdir(parents=True)
    parameters.write_text("wandb_version: 1\n\nnorm.impl:\n  value: fused\nseed:\n  value: 2\n")
    names = {"SWEEP_ID": "s1", "RUN_ID": "r1", "SWEEP_PARAM_PATH": str(parameters), "PROJECT": "p", "DIR": str(tmp_path)}
    for name, value in names.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def test_a_job_of_an_agent_is_its_run_in_the_sweeps_project(agent, tmp_path):
    cfg = composed(["logging.project=mine", "logging.entity=me"])
    with open_run(Start(cfg, tmp_path / "run"), torch.device("cpu")) as run:
        start(run)
        theirs = run.tracker._run
        assert (theirs.id, theirs.project, theirs.settings.sweep_id) == ("r1", "p", "s1")
        assert (theirs.group, theirs.name) == ("sweep_s1", "sweep_s1/norm.impl-fused_seed-2")
    assert [path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")] == ["run-r1.wandb"]


def test_several_runs_in_one_job_of_an_agent_are_refused(agent, tmp_path):
    opened = open_run(Start(composed([]), tmp_path), torch.device("cpu"), "a_sweep")
    with pytest.raises(ConfigError, match="job of a W&B agent is one run"), opened as run:
        start(run)
