"""The examples do what they say: at parity, timed, in seconds on a CPU, started as files from any folder."""

import importlib
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.runs import ROOT

CODE = """
import contextlib, os, pathlib, runpy, sys, scipy.stats, torch, torch._dynamo, torch.distributed.tensor
with contextlib.suppress(ImportError):
    import transformers
for path in sys.argv[1:]:
    if os.fork() == 0:  # each finds nothing of the project that another has imported
        print("example", pathlib.Path(path).stem)
        runpy.run_path(path, run_name="__main__")
        print({"model", "data", "configs"} & set(sys.modules))  # their names are the user's: nanoGPT has a model.py
        os._exit(0)
    os.wait()
"""


def test_examples_are_at_parity_and_time_themselves(tmp_path):
    checks = {"nanogpt_block": 3, "own_training_loop": 1, "vit_droppath": 1}
    checks |= {"hf_gpt2": 1, "hf_llama": 2, "hf_qwen3": 2} if find_spec("transformers") else {}
    files = [file for file in (ROOT / "examples").glob("*.py") if file.stem != "__init__"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-u", "-c", CODE, *files]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "transformers" not in line] == [] and len(files) == 6
    printed = {text.split()[0]: text for text in done.stdout.split("example ")[1:]}
    for name, count in checks.items():
        out = printed[name]
        assert out.count("Parity holds in ") == count and "Parity fails" not in out, out
        assert out.count("forward + backward: ") == (3 if name == "nanogpt_block" else 1)
        assert out.endswith("\nset()\n")


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama", "hf_qwen3"])
def test_without_transformers_an_example_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, f"examples.{name}", raising=False)
    with pytest.raises(SystemExit, match=r"transformers is missing\. pip install 'transformers>=5\.20'"):
        importlib.import_module(f"examples.{name}")
