"""python -m benchmarks.records: what it runs, where it goes on, and that its plan is short."""

import json
import re
import shlex
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from ablate import variants_of
from benchmarks import records
from benchmarks.records import RECORDS
from configs.machine import Machine
from measure.sources import ROOT, tree_hash
from study.arms import study_of
from tests.benchmarks.records import ENVIRONMENT

GIT = {"revision": "abc", "dirty": False}


@pytest.fixture
def broken():
    """What the reports of programs have besides, that end with exit code 1."""
    return {}


@pytest.fixture
def ran(tmp_path, monkeypatch, broken):
    """The commands that it started. They write what the programs would write."""
    commands, here = [], tmp_path / "nvidia-h200"

    def run(words, env, stdout, **_):
        commands.append(words[1:])
        program = words[2] if words[1] == "-m" else words[1]
        stdout.write(f"on {env['CUDA_VISIBLE_DEVICES']}\n".encode())
        stdout.flush()
        record = {"command": f"python {shlex.join(words[1:])}", "environment": ENVIRONMENT | {"git": GIT}, "unfinished": ""}
        modules = {"measure/sources.py": tree_hash((ROOT / "measure/sources.py").read_text())}
        record["code"] = {"modules": modules, "kernels": {"norm_forward_kernel": ["1"]}}
        record |= broken.get(program, {})
        folder, files = here, {f"{program.removeprefix('benchmarks.').removesuffix('.benchmark')}.json": json.dumps(record)}
        if "--models" in words:
            files = {"norms_models.json": json.dumps(record)}
        if program in ("ablate.py", "compare.py"):
            record["command"] += " -m"
            folder = tmp_path / next(word for word in words if word.startswith("folder=")).removeprefix("folder=")
            files = {"report.json": json.dumps(record), "report.md": record["command"], "kernels.jsonl": ""}
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        return SimpleNamespace(returncode=int(program in broken))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(records.command, "FOLDER", tmp_path)
    monkeypatch.setattr(records.command, "SCRATCH", tmp_path / "printed")
    monkeypatch.setattr(records.command, "environment", lambda *_: ENVIRONMENT | {"git": GIT})
    monkeypatch.setattr(records.subprocess, "run", run)
    monkeypatch.setattr(records.readme, "main", lambda _: commands.append("readme"))
    return commands


def test_all_records_are_made_once_and_what_is_done_is_left_alone(ran, tmp_path, monkeypatch, capsys):
    records.main([])
    assert len(ran) == len(RECORDS) + 1 and ran[-1] == "readme"
    gpt2 = tmp_path / "nvidia-h200" / "ablation" / "gpt2"
    assert sorted(path.name for path in gpt2.iterdir()) == ["report.json", "report.md"], "without what no page reads"
    assert (gpt2 / "report.md").read_text() == f"python {RECORDS[0].words}", "the command that repeats it"
    ran.clear()
    (tmp_path / "nvidia-h200" / "host.json").unlink()
    file = json.loads((gpt2 / "report.json").read_text())
    (gpt2 / "report.json").write_text(json.dumps(file | {"unfinished": "1 of 6 parts"}))
    ran.clear()
    records.main([])
    assert sorted(words[0] for words in ran[:-1]) == ["-m", "ablate.py"], "what was cut short, and what is missing"
    ran.clear()
    memory = tmp_path / "nvidia-h200" / "memory.json"
    for path in (memory, gpt2 / "report.json"):
        path.write_text(path.read_text().replace('["1"]', '["2"]'))
    records.main(["memory", "gpt2", "host"])
    assert len(ran) == 4, "by name they are made anew"
    differ = re.findall(r"(\w+): compiled otherwise than in the earlier record: norm_forward_kernel\n", capsys.readouterr().out)
    assert sorted(differ) == ["gpt2", "memory"]
    ran.clear()
    monkeypatch.setitem(GIT, "revision", "def")
    records.main([])
    assert ran == ["readme"], "a revision with the same code"
    ran.clear()
    overview = tmp_path / "nvidia-h200" / "study" / "overview" / "report.json"
    overview.write_text(overview.read_text().replace(tree_hash((ROOT / "measure/sources.py").read_text()), "another"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "nvidia-h200" / "scaling.json").unlink()
    records.main([])
    assert [words[1] for words in ran[:-1]] == ["study=overview"], "of other code; what needs two GPUs is left out"


def test_each_gpu_makes_one_record_at_a_time_and_a_limit_leaves_those_that_would_not_end(ran, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    started = {}
    run = records.subprocess.run

    def noted(words, env, **more):
        mine = env["CUDA_VISIBLE_DEVICES"].split(",")
        assert not [gpu for gpu in mine if gpu in started.values()], "in use"
        started.update({tuple(words): gpu for gpu in mine[:1]})
        done = run(words, env=env, **more)
        started.pop(tuple(words))
        return done

    monkeypatch.setattr(records.subprocess, "run", noted)
    records.main(["--minutes", "3.5"])
    said = capsys.readouterr().out
    short = [record.name for record in RECORDS if record.minutes < 3.5]
    assert len(ran) == len(short) + 1 and all(f"{name}, GPU " in said for name in short)
    assert "scaling is left out: it needs 2 GPUs for 7 minutes" in said and "gpt2 is left out: it needs 1 GPU for 5" in said
    assert {(tmp_path / "printed" / f"{name}.log").read_text() for name in short} == {"on 4\n", "on 6\n"}
    ran.clear()
    records.main([])
    said = capsys.readouterr().out
    assert "scaling, GPU 4 and 6: " in said or "scaling, GPU 6 and 4: " in said, "in the order in which they became free"
    assert len(ran) == len(RECORDS) - len(short) + 1


def test_a_record_that_fails_ends_no_other_and_its_last_lines_are_shown(ran, broken, capsys):
    broken["benchmarks.host"] = {}
    with pytest.raises(SystemExit, match=r"^failed: host$"):
        records.main(["host", "memory", "rotary", "host"])
    assert len(ran) == 4 and ran[-1] == "readme"
    assert "minutes, exit code 1\non " in capsys.readouterr().out


def test_an_ablation_whose_parity_fails_is_a_record_and_one_that_an_error_ends_is_none(ran, broken, tmp_path, capsys):
    path = tmp_path / "nvidia-h200" / "ablation" / "shakespeare_char" / "report.json"
    fails = {"parity": [{"holds": True}, {"holds": False}]}
    broken["ablate.py"] = fails
    records.main(["shakespeare_char"])
    said, record = capsys.readouterr().out, path.read_text()
    assert "shakespeare_char: parity fails\n" in said and "exit code 0" in said
    assert json.loads(record)["parity"] == fails["parity"]
    for report in ({"parity": [{"holds": True}]}, fails | {"unfinished": "1 of 3 parts"}):
        broken["ablate.py"] = report
        with pytest.raises(SystemExit, match=r"^failed: shakespeare_char$"):
            records.main(["shakespeare_char"])
        said = capsys.readouterr().out
        assert "exit code 1" in said and "parity fails" not in said
        assert path.read_text() == record, "the earlier one stays"


def test_the_plan_is_at_most_an_hour_on_one_card_and_its_commands_are_read_as_they_stand(capsys, monkeypatch):
    assert (
        sum(record.minutes for record in RECORDS if record.gpus == 1) <= 60 and max(record.minutes for record in RECORDS) <= 10
    )
    records.main(["--list"])
    said = capsys.readouterr().out
    assert all(f"python {record.words}" in said for record in RECORDS) and "minutes in all" in said
    monkeypatch.setattr("ablate.machine.inspect", lambda _: Machine("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for record in RECORDS:
        words = record.words.split()
        read = {"ablation": variants_of, "study": study_of}.get(record.folder)
        assert read(words[1:]) if read else import_module(words[1]).options_of(words[2:])


@pytest.mark.parametrize(
    ("git", "gpu", "names", "message"),
    [
        (None, True, [], "set GIT_REVISION"),
        (GIT | {"dirty": True}, True, [], "commit the code"),
        (GIT, False, [], "there is no GPU here"),
        (GIT, True, ["gpt3"], "gpt3: no such record; there are gpt2, "),
    ],
)
def test_what_can_not_be_recorded_is_refused_with_the_remedy(ran, git, gpu, names, message, monkeypatch, capsys):
    monkeypatch.setattr(records.command, "environment", lambda *_: ENVIRONMENT | {"git": git})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(SystemExit):
        records.main(names)
    assert message in capsys.readouterr().err and not ran
