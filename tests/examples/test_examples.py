"""The examples do what they say: at parity, timed, in seconds on a CPU, started as files from any folder."""

import os
import subprocess
import sys
from importlib.util import find_spec

from tests.runs import ROOT

CODE = """
import contextlib, os, pathlib, runpy, sys, scipy.stats, torch, torch._dynamo, torch.distributed.tensor
root, *files = sys.argv[1:]
with contextlib.suppress(ImportError):
    import transformers
for path in files:
    if os.fork() == 0:  # each finds nothing of the project that another has imported
        sys.path.insert(0, root)
        import measure.schedule
        measure.schedule.MOST_STEPS = measure.schedule.LEAST_STEPS  # a block is over sooner
        sys.path.remove(root)
        print("example", pathlib.Path(path).stem)
        runpy.run_path(path, run_name="__main__")
        print({"model", "data", "configs"} & set(sys.modules))  # their names are the user's: nanoGPT has a model.py
        os._exit(0)
    os.wait()
"""


def test_examples_are_at_parity_and_time_themselves(tmp_path):
    names = ["nanogpt_block", "dit_block", "graphed_step", *(["hf_llama"] if find_spec("transformers") else [])]
    files = [ROOT / "examples" / f"{name}.py" for name in names]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-u", "-c", CODE, ROOT, *files], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert [line for line in done.stderr.splitlines() if "transformers" not in line] == []
    printed = {text.split()[0]: text for text in done.stdout.split("example ")[1:]}
    assert list(printed) == names
    out = printed.pop("graphed_step")
    assert "no graph: " in out and out.endswith("\nset()\n"), "no GPU, no graph"
    for name, out in printed.items():
        assert out.count("Parity holds in ") == (1 if name == "dit_block" else 2) and "Parity fails" not in out, out
        assert out.count("forward + backward: ") == (2 if name == "nanogpt_block" else 1) and out.endswith("\nset()\n")
