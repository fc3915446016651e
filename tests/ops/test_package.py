"""ops/ as a folder that people copy into their own tree."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import ops

OPS = Path(ops.__file__).parent


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
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "PyTorch reference False\n", done.stderr


def test_ops_imports_torch_triton_and_the_standard_library_only():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for file in OPS.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module)
            assert {name.split(".")[0] for name in names} <= allowed, file.name


def test_programs_that_train_import_nothing_of_adopt():
    """Their records know the modules that they imported, and would be old after each change of these."""
    code = "import sys, train, ablate, compare; print([name for name in sys.modules if name.startswith('ops.adopting')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=OPS.parent, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_adopt_is_the_function_whatever_of_it_is_imported():
    from ops.adopting import lazy, whole

    assert lazy.__package__ == "ops.adopting"
    assert ops.adopt is whole.adopt
