"""The examples do what they say: at parity, timed, in seconds on a CPU."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "checks"), [("nanogpt_block", 3), ("hf_gpt2", 1), ("hf_llama", 2), ("own_training_loop", 1), ("vit_droppath", 1)]
)
def test_example_is_at_parity_and_times_itself(name, checks, capsys):
    if name.startswith("hf_"):
        pytest.importorskip("transformers", minversion="5.20")
    example = importlib.import_module(f"examples.{name}")
    example.main()
    out = capsys.readouterr().out
    assert out.count("Parity holds in ") == checks and "Parity fails" not in out, out
    assert out.count("forward + backward: ") == (3 if name == "nanogpt_block" else 1)
    assert ("fused (" in out) == (name in ("nanogpt_block", "hf_gpt2", "hf_llama"))


def test_an_example_can_be_started_as_a_file_from_any_folder(tmp_path):
    code = """
import os, runpy, sys, torch
for path in sys.argv[1:]:
    if os.fork() == 0:  # each finds nothing that another has imported
        runpy.run_path(path, run_name="example")
        os._exit(0)
    os.wait()
"""
    files = [file for file in EXAMPLES.glob("*.py") if file.stem != "__init__"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code, *files], cwd=tmp_path, env=env, capture_output=True, text=True)
    missing = [line for line in done.stderr.splitlines() if "transformers is missing" not in line]
    assert len(files) == 5 and missing == []


@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_without_transformers_an_example_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(importlib.sys.modules, "transformers", None)
    monkeypatch.delitem(importlib.sys.modules, f"examples.{name}", raising=False)
    with pytest.raises(SystemExit, match=r"transformers is missing\. pip install 'transformers>=5\.20'"):
        importlib.import_module(f"examples.{name}")


def test_the_fused_model_trains_as_the_textbook_one_does():
    example = importlib.import_module("examples.own_training_loop")
    torch.manual_seed(0)
    textbook, fused, x = example.Textbook(), example.Fused(), torch.randn(256, 64)
    fused.load_state_dict(textbook.state_dict())
    losses = [list(example.train(model, x, steps=5)) for model in (textbook, fused)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_drop_path_through_rowscale_leaves_out_the_same_samples():
    example = importlib.import_module("examples.vit_droppath")
    before, after = (example.ViT(block, 16, 2, 3, p=0.9) for block in (example.Before, example.After))
    after.load_state_dict(before.state_dict())
    patches, outputs = torch.randn(32, 5, 48), []
    for model in (before, after):
        torch.manual_seed(0)
        outputs.append(model(patches))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[0], before.eval()(patches), atol=1e-2)  # some were left out
