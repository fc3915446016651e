"""Recorded results: one file of one run."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import command, norms
from benchmarks.command import Results, environment, slug
from measure.environment import libraries
from measure.sources import code
from tests.benchmarks.records import ENVIRONMENT
from tests.runs import raising


def test_a_record_is_of_one_run_which_replaces_the_earlier_one_when_it_is_whole(tmp_path):
    path = tmp_path / "gpu" / "norms.json"
    for us in (1.0, 2.0):
        results = Results(path, ENVIRONMENT, "python -m benchmarks.norms")
        results.add([{"us": us}])
        assert json.loads(results.part.read_text())["records"] == [{"us": us}], "whole after each cell"
        assert not path.exists() or json.loads(path.read_text())["records"][0] == {"us": 1.0}, "the earlier one is left"
        results.add([{"us": us + 1}])
        results.finish()
    assert [p.name for p in path.parent.iterdir()] == ["norms.json"]
    found = json.loads(path.read_text())
    assert found.pop("code") == code()
    assert found == {
        "environment": ENVIRONMENT | {"versions": ENVIRONMENT["versions"] | libraries()},
        "command": "python -m benchmarks.norms",
        "records": [{"us": 2.0}, {"us": 3.0}],
    }


def test_environment_has_device_versions_and_the_revision_of_the_repository_or_of_the_variable(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(__version__="0.8"))
    facts = environment(torch.device("cpu"))
    assert facts["versions"]["quack-kernels"] == "0.8" and "torch" in facts["versions"] and "command" not in facts
    assert facts["gpu"] is None and slug(facts) == "cpu"
    assert slug({"gpu": {"name": "NVIDIA H100 80GB HBM3"}}) == "nvidia-h100"
    assert slug({"gpu": {"name": "AMD Instinct MI300X (OAM)"}}) == "amd-instinct-mi300x-oam"
    monkeypatch.setattr("measure.environment._git", lambda *_: None)  # copied without its repository
    assert environment(torch.device("cpu"))["git"] is None
    monkeypatch.setenv("GIT_REVISION", "abc")
    assert environment(torch.device("cpu"))["git"]["revision"] == "abc"


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(command, "import_module", raising(RuntimeError("no CUDA device\nfound")))
    assert command.importable(None, ["liger-kernel"]) == []
    assert capsys.readouterr().err == "missing: liger-kernel (RuntimeError: no CUDA device\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in ((["--device", "cpu", "--width", "0"], "0 is not positive"), ([], "--device cpu tries")):
        with pytest.raises(SystemExit) as error:
            norms.main(arguments)
        assert error.value.code == 2 and message in capsys.readouterr().err
