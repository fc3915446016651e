"""The W&B mode is settled before the start, from what is on this machine."""

import os
import subprocess
import sys

import pytest

from configs.schema import LoggingConfig, WandbMode
from tests.runs import ROOT
from training import tracking
from training.tracking import Tracker, agent_job, settle_mode

ONLINE, OFFLINE, DISABLED = WandbMode.online, WandbMode.offline, WandbMode.disabled


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


@pytest.mark.parametrize("without_key", [OFFLINE, DISABLED])
def test_online_without_a_key_becomes_what_the_config_says(no_key, without_key):
    mode, why = settle_mode(LoggingConfig(wandb=ONLINE, without_key=without_key))

    assert mode is without_key
    assert "no API key" in why


@pytest.mark.parametrize("mode", [OFFLINE, DISABLED])
def test_other_modes_need_no_key(no_key, mode):
    assert settle_mode(LoggingConfig(wandb=mode)) == (mode, "")


def test_a_key_in_the_environment_counts(no_key, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)

    assert settle_mode(LoggingConfig(wandb=ONLINE)) == (ONLINE, "")


def test_a_key_in_netrc_counts_for_its_own_host_only(no_key, monkeypatch):
    no_key.write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    no_key.chmod(0o600)

    assert tracking.has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not tracking.has_key()


def test_a_broken_netrc_is_no_key(no_key):
    no_key.write_text("nonsense nonsense")

    assert not tracking.has_key()


def test_a_failed_online_start_goes_on_as_without_a_key(monkeypatch, tmp_path):
    def init(**_):
        raise tracking.wandb.errors.CommError("no route to host\nmore")

    monkeypatch.setattr(tracking.wandb, "init", init)

    tracker = Tracker(ONLINE, DISABLED, tmp_path, project="p", group=None, name="n", tags=[], config={})

    assert tracker.mode is DISABLED
    assert tracker.note == "online start failed: no route to host"
    tracker.log({"a": 1}, step=1)
    tracker.finish(0)


def test_an_unreachable_server_is_waited_for_no_longer_than_the_timeout(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(tracking.wandb, "init", lambda **arguments: seen.update(arguments))

    Tracker(ONLINE, DISABLED, tmp_path, project="p", group="g", name="n", tags=["t"], config={})

    assert seen["settings"].init_timeout == tracking.START_TIMEOUT_S <= 60
    assert (seen["group"], seen["dir"], seen["mode"]) == ("g", str(tmp_path), "online")


def test_each_run_has_an_id_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "shared")
    ids = []
    monkeypatch.setattr(tracking.wandb, "init", lambda **arguments: ids.append(arguments["id"]))

    for _ in range(3):
        Tracker(OFFLINE, DISABLED, tmp_path, project="p", group=None, name="n", tags=[], config={})

    assert len(set(ids)) == 3 and "shared" not in ids


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """The environment that a W&B agent gives a job of its sweep."""
    parameters = tmp_path / "wandb" / "sweep-s1" / "config-r1.yaml"
    parameters.parent.mkdir(parents=True)
    parameters.write_text("wandb_version: 1\n\nnorm.impl:\n  value: fused\nseed:\n  value: 2\n")
    names = {"SWEEP_ID": "s1", "RUN_ID": "r1", "SWEEP_PARAM_PATH": str(parameters), "PROJECT": "p", "DIR": str(tmp_path)}
    for name, value in names.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def test_a_job_of_an_agent_is_named_after_its_sweep_and_what_is_swept(agent):
    assert agent_job() == ("sweep_s1", "norm.impl-fused_seed-2")


def test_without_an_agent_there_is_no_such_name(monkeypatch):
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert agent_job() is None


def test_wandb_gives_the_job_of_an_agent_the_agents_id_and_the_sweeps_project(agent, tmp_path):
    code = (
        "from pathlib import Path; from configs.schema import WandbMode; from training.tracking import Tracker\n"
        "said = {'project': 'mine', 'group': 'g', 'name': 'n', 'tags': [], 'config': {}}\n"
        "tracker = Tracker(WandbMode.offline, WandbMode.offline, Path.cwd(), **said)\n"
        "run = tracker._run; print(run.id, run.project, run.settings.sweep_id, run.group); tracker.finish(0)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["r1", "p", "s1", "g"], done.stderr
    assert [path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")] == ["run-r1.wandb"]


def test_the_tracker_leaves_id_and_project_to_the_agent(agent, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(tracking.wandb, "init", lambda **arguments: seen.update(arguments))

    Tracker(OFFLINE, DISABLED, tmp_path, project="mine", group="g", name="n", tags=[], config={})

    assert (seen["id"], seen["project"], seen["group"], seen["name"]) == (None, None, "g", "n")
