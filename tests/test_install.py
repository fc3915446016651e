"""What `pip install` of this repository gives: the norms, under one name that is nobody else's."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"


def python(code: str, cwd: Path, *path: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder as `pip install --target` would fill it."""
    pytest.importorskip("setuptools")
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("ops", "model", "data", "configs", "training", "ablation", "benchmarks", "measure", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = python(BUILD, source, arguments=(str(wheels),))
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_a_wheel_holds_one_package_whose_name_is_its_own(installed):
    packages = [path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")]
    assert packages == ["prenorm"]
    modules = {path.relative_to(ROOT / "ops") for path in (ROOT / "ops").rglob("*.py")}
    assert {path.relative_to(installed / "prenorm") for path in (installed / "prenorm").rglob("*.*")} == modules


def test_a_wheel_asks_for_torch_and_triton_alone(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    needs = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [need.split()[1].split(">")[0] for need in needs] == ["torch", "triton"]


def test_a_wheel_describes_itself_in_a_line(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "\nSummary: A transformer training microframework" in text and len(text) < 2000


def test_the_installed_norms_run_beside_a_copied_folder_and_other_peoples_ops_and_model(installed, tmp_path):
    shutil.copytree(ROOT / "ops", tmp_path / "theirs" / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ops", "model", "data"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    code = """
import torch, prenorm, ops, model, data
from theirs.ops import rms_norm_fn
assert ops.mine and model.mine and data.mine
x = torch.randn(4, 32)
assert torch.equal(rms_norm_fn(x, None, None, dropout_p=0.5, seed=1), prenorm.rms_norm_fn(x, None, None, dropout_p=0.5, seed=1))
net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32))
prenorm.replace_norms(net)
net(x).sum().backward()
"""
    done = python(code, tmp_path, tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1: LayerNorm(32) → fused (LayerNorm, eps 1e-05)\n"


def test_copies_that_can_not_live_together_say_so(tmp_path):
    for folder in ("a_b", "a/b"):
        shutil.copytree(ROOT / "ops", tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    done = python("import a_b, a.b", tmp_path, tmp_path)
    assert "ImportError: a.b: this process has operators called prenorm_a_b already" in done.stderr
