import json

import pytest
import torch

from benchmarks import results
from benchmarks.command import Results, ResultsError, differences, environment, load, slug
from measure.tables import machine

KEY = ("case", "N", "provider")


@pytest.fixture
def facts():
    return {
        "git": {"revision": "abc", "dirty": False}, "versions": {"torch": "2.11.0", "quack-kernels": "0.6"},
        "cuda": "13.0", "hip": None, "gpu": {"name": "NVIDIA H200", "driver": "580.1"},
    }  # fmt: skip


def record(n, provider="ours", us=1.0):
    return {"case": "ln", "N": n, "provider": provider, "us": us}


def test_runs_with_disjoint_cells_add_up_and_the_same_cell_is_replaced(tmp_path, facts):
    path = tmp_path / "gpu" / "norms.json"
    Results(path, KEY, facts, "first").add([record(1), record(2)])
    Results(path, KEY, facts, "second").add([record(2, us=5.0), record(3), record(2, "torch")])

    file = load(path)
    assert [(r["N"], r["provider"], r["us"]) for r in file["records"]] == [
        (1, "ours", 1.0), (2, "ours", 5.0), (3, "ours", 1.0), (2, "torch", 1.0),
    ]  # fmt: skip
    assert file["command"] == "first && second"
    assert file["environment"] == facts


def test_file_on_disk_is_whole_after_every_cell(tmp_path, facts):
    path = tmp_path / "norms.json"
    results = Results(path, KEY, facts, "run")
    for n in range(3):
        results.add([record(n)])
        assert len(json.loads(path.read_text())["records"]) == n + 1
    assert [p.name for p in tmp_path.iterdir()] == ["norms.json"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"gpu": {"name": "NVIDIA H100"}}, "GPU NVIDIA H200 there, NVIDIA H100 here"),
        ({"gpu": None}, "GPU NVIDIA H200 there, None here"),
        ({"git": {"revision": "def", "dirty": False}}, "git revision abc there, def here"),
        ({"git": {"revision": "abc", "dirty": True}}, "uncommitted changes"),
        ({"versions": {"torch": "2.12.0"}}, "torch 2.11.0 there, 2.12.0 here"),
        ({"cuda": "12.8"}, "CUDA 13.0 there"),
    ],
)
def test_results_of_another_environment_are_refused_unless_fresh(tmp_path, facts, change, message):
    path = tmp_path / "norms.json"
    Results(path, KEY, facts, "run").add([record(1)])
    elsewhere = facts | change
    with pytest.raises(ResultsError, match=message) as error:
        Results(path, KEY, elsewhere, "run")
    assert "--fresh" in str(error.value)

    fresh = Results(path, KEY, elsewhere, "run", fresh=True)
    fresh.add([record(2)])
    assert [r["N"] for r in load(path)["records"]] == [2]


def at(facts, revision, **changed):
    return facts | {"git": {"revision": revision, "dirty": False}} | changed


def test_renewed_cells_are_of_this_revision_and_the_others_say_of_which_they_are(tmp_path, facts):
    path = tmp_path / "norms.json"
    Results(path, KEY, at(facts, "abc"), "run").add([record(1), record(2), record(2, "torch"), record(3)])
    Results(path, KEY, at(facts, "def"), "again", renew=True).add([record(2, us=5.0), record(2, "torch", us=6.0)])

    file = load(path)
    assert [(r["N"], r["us"], r.get("revision")) for r in file["records"]] == [
        (1, 1.0, "abc"), (2, 5.0, None), (2, 6.0, None), (3, 1.0, "abc"),
    ]  # fmt: skip
    assert file["environment"]["git"] == {"revision": "def", "dirty": False, "others": {"abc": 2}}
    assert machine(file["environment"]).endswith("git def (2 records of abc)")

    # A third revision, and then the first again: each record keeps the one that it was measured at.
    Results(path, KEY, at(facts, "ghi"), "third", renew=True).add([record(3)])
    assert [r.get("revision") for r in load(path)["records"]] == ["abc", "def", "def", None]
    Results(path, KEY, at(facts, "abc"), "first", renew=True).add([record(4)])
    assert [r.get("revision") for r in load(path)["records"]] == [None, "def", "def", "ghi", None]
    assert load(path)["environment"]["git"]["others"] == {"def": 2, "ghi": 1}
    whole = Results(path, KEY, at(facts, "jkl"), "whole", renew=True)
    for cells in ([record(1), record(2)], [record(3)], [record(4)]):
        whole.add(cells)
    assert load(path)["environment"]["git"] == {"revision": "jkl", "dirty": False}


def test_a_renewed_record_has_nothing_beside_it_that_was_measured_with_another(tmp_path, facts, capsys):
    path = tmp_path / "norms.json"
    Results(path, KEY, at(facts, "abc"), "run").add([record(1), record(1, "torch"), record(2, "torch")])
    Results(path, KEY, at(facts, "def"), "run", renew=True).add([record(1)])
    assert [(r["N"], r["provider"]) for r in load(path)["records"]] == [(1, "ours"), (2, "torch")]
    assert "dropped, as not measured again beside the others: ('ln', 1, 'torch') of abc" in capsys.readouterr().err
    # In one revision cells of one comparison may come in several runs, as ever.
    Results(path, KEY, at(facts, "def"), "run").add([record(1, "torch")])
    assert [(r["N"], r["provider"]) for r in load(path)["records"]] == [(1, "ours"), (2, "torch"), (1, "torch")]


@pytest.mark.parametrize(
    "change", [{"gpu": {"name": "NVIDIA H100"}}, {"cuda": "12.8"}, {"git": {"revision": "def", "dirty": True}}, {"git": None}]
)
def test_only_another_clean_revision_can_be_renewed(tmp_path, facts, change):
    path = tmp_path / "norms.json"
    Results(path, KEY, facts, "run").add([record(1)])
    with pytest.raises(ResultsError) as error:
        Results(path, KEY, at(facts, "def") | change, "run", renew=True)
    assert "--renew" not in str(error.value)
    with pytest.raises(ResultsError, match="--renew to measure these cells again"):
        Results(path, KEY, at(facts, "def"), "run", renew=False)
    with pytest.raises(ResultsError) as error:
        Results(path, KEY, at(facts, "def"), "run")  # of a program that has no such option
    assert "--renew" not in str(error.value)


def test_a_renewal_that_was_cut_short_has_only_what_it_measured(tmp_path, facts):
    path = tmp_path / "norms.json"
    Results(path, KEY, at(facts, "abc"), "run").add([record(1), record(2)])
    Results(path, KEY, at(facts, "def"), "run", renew=True).add([record(1)])
    going_on, as_it_is = (Results(path, KEY, at(facts, "def"), "run", renew=renew) for renew in (True, False))
    assert [going_on.has(case="ln", N=n, provider="ours") for n in (1, 2, 3)] == [True, False, False]
    assert [as_it_is.has(case="ln", N=n, provider="ours") for n in (1, 2, 3)] == [True, True, False]


def test_a_library_that_only_one_run_had_does_not_separate_them(tmp_path, facts):
    path = tmp_path / "norms.json"
    Results(path, KEY, facts, "run").add([record(1)])
    fewer = facts | {"versions": {"torch": "2.11.0", "apex": "1"}}
    assert differences(facts, fewer) == []
    Results(path, KEY, fewer, "run").add([record(2)])
    assert load(path)["environment"]["versions"] == {"torch": "2.11.0", "quack-kernels": "0.6", "apex": "1"}


@pytest.mark.parametrize("text", ["{", "[]", '{"records": []}'])
def test_broken_file_is_refused_by_name(tmp_path, facts, text):
    path = tmp_path / "norms.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=str(path)):
        Results(path, KEY, facts, "run")


def test_environment_has_device_versions_and_revision():
    facts = environment(torch.device("cpu"), {"liger-kernel": "0.8"})
    assert facts["versions"]["torch"] == torch.__version__.split("+")[0] or facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["liger-kernel"] == "0.8"
    assert facts["gpu"] is None and slug(facts) == "cpu"
    assert "command" not in facts


def test_revision_can_be_told_where_there_is_no_repository(monkeypatch):
    monkeypatch.setattr(results, "facts_of", lambda device: {"command": "", "git": None, "versions": {"wandb": None}})
    assert environment(torch.device("cpu"), {}, "abc")["git"] == {"revision": "abc", "dirty": False}
    assert environment(torch.device("cpu"), {})["git"] is None


def test_a_repository_is_not_told_its_revision(monkeypatch):
    git = {"revision": "0123456789", "dirty": False}
    monkeypatch.setattr(results, "facts_of", lambda device: {"command": "", "git": git, "versions": {}})
    with pytest.raises(ResultsError, match=r"--revision abc.*at 01234567.*Leave the option out"):
        environment(torch.device("cpu"), {}, "abc")


def test_folder_is_named_by_the_gpu(facts):
    assert slug(facts) == "nvidia-h200"
    assert slug({"gpu": {"name": "AMD Instinct MI300X (OAM)"}}) == "amd-instinct-mi300x-oam"
