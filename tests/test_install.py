"""What `pip install` of this repository gives: the norms, under one name that is nobody else's."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.runs import ROOT

BUILD = "import setuptools.build_meta as backend, sys; getattr(backend, sys.argv[1])(sys.argv[2])"
CHECK = ("check", "models", "rounding", "comparison", "schedule", "statistics", "tables", "clock")


def python(code: str, cwd: Path, *arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the wheel lies that the source distribution builds, as `pip install --target` unpacks it."""
    pytest.importorskip("setuptools")
    source, made, unpacked, target = (tmp_path_factory.mktemp(name) for name in ("source", "made", "unpacked", "target"))
    kept = shutil.ignore_patterns(".*", "__pycache__", "runs", "results", "docs", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=kept, dirs_exist_ok=True)
    done = python(BUILD, source, "build_sdist", str(made))
    assert done.returncode == 0, done.stderr
    [archive] = made.iterdir()
    shutil.unpack_archive(archive, unpacked, filter="data")
    [folder] = unpacked.iterdir()
    assert not list(folder.rglob("test*.py"))
    done = python(BUILD, folder, "build_wheel", str(made))
    assert done.returncode == 0, done.stderr
    [wheel] = made.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_it_is_one_package_that_asks_for_torch_and_triton(installed):
    assert [path.name for path in installed.iterdir() if path.suffix != ".dist-info"] == ["prenorm"]
    modules = {path.relative_to(ROOT / "ops") for path in (ROOT / "ops").rglob("*.*") if path.suffix in (".py", ".typed")}
    modules |= {Path("check", f"{name}.py") for name in ("__init__", *CHECK)}
    assert {path.relative_to(installed / "prenorm") for path in (installed / "prenorm").rglob("*.*")} == modules
    [metadata] = installed.glob("*.dist-info/METADATA")
    needs = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [need.split()[1].split(">")[0] for need in needs] == ["torch", "triton"]


def test_it_runs_beside_other_peoples_ops_and_model_and_a_copy_of_itself(installed, tmp_path):
    for copy in ("theirs/ops", "a_b", "a/b"):
        shutil.copytree(ROOT / "ops", tmp_path / copy, ignore=shutil.ignore_patterns("__pycache__"))
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
from prenorm.check import check_parity, measure
before = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32))
before.load_state_dict(net.state_dict())
assert check_parity(before, net, x).holds and prenorm.__version__
import a_b, a.b
"""
    done = python(code, tmp_path, path=(tmp_path, installed))
    assert done.stdout == "1: LayerNorm(32) → fused (LayerNorm, eps 1e-05)\n"
    refused = "ImportError: a.b: this process has operators called prenorm_a_b already"  # copies that can't live together
    assert done.stderr.splitlines()[-1].startswith(refused), done.stderr
