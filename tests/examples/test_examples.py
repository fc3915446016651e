"""The examples do what they say: at parity, timed, in seconds on a CPU."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.runs import ROOT

CODE = """
import contextlib, os, runpy, sys, torch
with contextlib.suppress(ImportError):
    import transformers
for path in sys.argv[1:]:
    if os.fork() == 0:  # each finds nothing of the project that another has imported
        runpy.run_path(path, run_name="example")
        print({"model", "data", "configs"} & set(sys.modules))  # their names are the user's: nanoGPT has a model.py
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(
    ("name", "checks"), [("nanogpt_block", 3), ("hf_gpt2", 1), ("hf_llama", 2), ("own_training_loop", 1), ("vit_droppath", 1)]
)
def test_example_is_at_parity_and_times_itself(name, checks, capsys):
    if name.startswith("hf_"):
        pytest.importorskip("transformers", minversion="5.20")
    importlib.import_module(f"examples.{name}").main()
    out = capsys.readouterr().out
    assert out.count("Parity holds in ") == checks and "Parity fails" not in out, out
    assert out.count("forward + backward: ") == (3 if name == "nanogpt_block" else 1)


def test_an_example_can_be_started_as_a_file_from_any_folder(tmp_path):
    files = [file for file in (ROOT / "examples").glob("*.py") if file.stem != "__init__"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-u", "-c", CODE, *files]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "transformers is missing" not in line] == []
    assert len(files) == 5 and done.stdout.splitlines() == ["set()"] * (5 if find_spec("transformers") else 3)


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_without_transformers_an_example_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
    with pytest.raises(SystemExit, match=r"transformers is missing\. pip install 'transformers>=5\.20'"):
        importlib.import_module(f"examples.{name}")
