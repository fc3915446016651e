"""ops/ as a folder that people copy into their own tree."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import ops

OPS = Path(ops.__file__).parent


def run_python(code: str, cwd: Path, **environment: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copy_under_another_name_runs_beside_the_original(tmp_path):
    shutil.copytree(OPS, tmp_path / "their_model" / "fused", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import sys, torch
sys.path.insert(0, {str(tmp_path)!r})
from their_model.fused import layer_norm_fn
x = torch.randn(4, 32, requires_grad=True)
y = layer_norm_fn(x, torch.ones(32), None, x, dropout_p=0.1, seed=1)
y.sum().backward()
assert not any(name == "ops" or name.startswith("ops.") for name in sys.modules), "the copy imports the original"
sys.path.insert(0, {str(OPS.parent)!r})
import ops
assert torch.equal(ops.layer_norm_fn(x, torch.ones(32), None, x, dropout_p=0.1, seed=1), y)
print("ran")
"""
    assert run_python(code, tmp_path, **{} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}) == "ran\n"


def test_import_needs_no_gpu_and_no_triton(tmp_path):
    code = f"""
import sys
sys.modules["triton"] = None
sys.path.insert(0, {str(OPS.parent)!r})
import torch, ops
x = torch.randn(4, 32)
ops.layer_norm_fn(x, None, None)
print(ops.backend_for("cpu"), torch.cuda.is_initialized())
"""
    assert run_python(code, tmp_path, CUDA_VISIBLE_DEVICES="") == "PyTorch reference False\n"


def test_ops_imports_torch_triton_and_the_standard_library_only():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for file in OPS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module)
            assert {name.split(".")[0] for name in names} <= allowed, file.name
