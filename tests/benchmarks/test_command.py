"""Recorded results: how runs add up, and what they refuse to add to."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks import command
from benchmarks.command import Results, ResultsError, environment, load, slug
from tests.benchmarks.records import ENVIRONMENT
from tests.runs import raising

KEY = ("case", "N", "provider")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gpu" / "norms.json"


def at(revision, dirty=False, **changed):
    return ENVIRONMENT | {"git": {"revision": revision, "dirty": dirty}} | changed


def record(n, provider="ours", us=1.0):
    return {"case": "ln", "N": n, "provider": provider, "us": us}


def add(path, facts, *records, run="run", **options):
    Results(path, KEY, facts, run, **options).add(records)


def kept(path, *fields):
    return [tuple(r.get(field) for field in fields) for r in load(path)["records"]]


def test_runs_add_up_the_same_cell_is_replaced_and_the_file_is_whole_after_each(path):
    for run in ("first", "first"):
        add(path, at("abc"), record(1), record(2), run=run)
    add(path, at("abc"), record(2, us=5.0), record(3), record(2, "torch"), run="second")
    assert kept(path, "N", "provider", "us") == [(1, "ours", 1.0), (2, "ours", 5.0), (3, "ours", 1.0), (2, "torch", 1.0)]
    assert load(path)["command"] == "first && second" and load(path)["environment"] == at("abc")
    assert [p.name for p in path.parent.iterdir()] == ["norms.json"]
    # a library that only one run had does not separate them
    add(path, at("abc", versions={"torch": "2.11.0", "apex": "1"}), record(4))
    assert load(path)["environment"]["versions"] == ENVIRONMENT["versions"] | {"apex": "1"}


@pytest.mark.parametrize(
    ("elsewhere", "message", "renewable"),
    [
        (at("abc", gpu={"name": "NVIDIA H100"}), "GPU NVIDIA H200 there, NVIDIA H100 here", False),
        (at("abc", gpu=None), "GPU NVIDIA H200 there, None here", False),
        (at("def"), "git revision abc there, def here", True),
        (at("def", dirty=True), "uncommitted changes", False),
        (at("abc", git=None), "git revision abc there, None here", False),
        (at("abc", versions={"torch": "2.12.0"}), "torch 2.11.0 there, 2.12.0 here", False),
        (at("abc", cuda="12.8"), "CUDA 13.0 there", False),
    ],
)
def test_results_of_another_environment_are_refused_unless_fresh_and_only_another_clean_revision_is_renewed(
    path, elsewhere, message, renewable
):
    add(path, at("abc"), record(1))
    for renew in (None, False):  # None: a program that has no such option
        with pytest.raises(ResultsError, match=message) as error:
            Results(path, KEY, elsewhere, "run", renew=renew)
        assert "--fresh" in str(error.value)
        assert ("--renew to measure these cells again" in str(error.value)) == (renewable and renew is False)
    with nullcontext() if renewable else pytest.raises(ResultsError):
        Results(path, KEY, elsewhere, "run", renew=True)
    add(path, elsewhere, record(2), fresh=True)
    assert kept(path, "N") == [(2,)]


def test_renewed_cells_are_of_this_revision_and_the_others_say_of_which_they_are(path):
    add(path, at("abc"), record(1), record(2), record(2, "torch"), record(3))
    add(path, at("def"), record(2, us=5.0), record(2, "torch", us=6.0), renew=True)
    assert kept(path, "N", "us", "revision") == [(1, 1.0, "abc"), (2, 5.0, None), (2, 6.0, None), (3, 1.0, "abc")]
    assert load(path)["environment"]["git"] == {"revision": "def", "dirty": False}
    going_on, as_it_is = (Results(path, KEY, at("def"), "run", renew=renew) for renew in (True, False))
    assert [going_on.has(case="ln", N=n, provider="ours") for n in (1, 2, 4)] == [False, True, False]
    assert [as_it_is.has(case="ln", N=n, provider="ours") for n in (1, 2, 4)] == [True, True, False]
    add(path, at("abc"), record(4), renew=True)  # the first revision again
    assert kept(path, "revision") == [(None,), ("def",), ("def",), (None,), (None,)]
    add(path, at("jkl"), record(1), record(2), record(2, "torch"), record(3), record(4), renew=True)
    assert load(path)["environment"]["git"] == {"revision": "jkl", "dirty": False}


def test_a_renewed_record_has_nothing_beside_it_that_was_measured_with_another(path, capsys):
    add(path, at("abc"), record(1), record(1, "torch"), record(2, "torch"))
    add(path, at("def"), record(1), renew=True)
    assert kept(path, "N", "provider") == [(1, "ours"), (2, "torch")]
    assert "dropped, as not measured again beside the others: ('ln', 1, 'torch') of abc" in capsys.readouterr().err
    add(path, at("def"), record(1, "torch"))  # in one revision cells of one comparison may come in several runs
    assert kept(path, "N", "provider") == [(1, "ours"), (2, "torch"), (1, "torch")]


@pytest.mark.parametrize("text", ["{", "[]", '{"records": []}'])
def test_broken_file_is_refused_by_name(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ResultsError, match=str(path)):
        Results(path, KEY, at("abc"), "run")


def test_environment_has_device_versions_and_the_revision_of_the_repository_or_of_the_option(monkeypatch):
    facts = environment(torch.device("cpu"), {"liger-kernel": "0.8"})
    assert facts["versions"]["liger-kernel"] == "0.8" and "torch" in facts["versions"] and "command" not in facts
    assert facts["gpu"] is None and slug(facts) == "cpu"
    assert slug({"gpu": {"name": "AMD Instinct MI300X (OAM)"}}) == "amd-instinct-mi300x-oam"
    git = None
    monkeypatch.setattr(command, "facts_of", lambda device: {"command": "", "git": git, "versions": {}})
    assert environment(torch.device("cpu"), {}, "abc")["git"] == {"revision": "abc", "dirty": False}
    assert environment(torch.device("cpu"), {})["git"] is None
    git = {"revision": "0123456789", "dirty": False}
    with pytest.raises(ResultsError, match=r"--revision abc.*at 01234567.*Leave the option out"):
        environment(torch.device("cpu"), {}, "abc")


def test_ctrl_c_ends_a_program_with_a_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.run(raising(KeyboardInterrupt()))
    assert stopped.value.code == 130 and "stopped; what was recorded by then is kept" in capsys.readouterr().err
