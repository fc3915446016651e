"""What `pip install` of this repository gives: the norms, under one name that is nobody else's."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.runs import ROOT

BUILD = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
CHECK = ("adoption", "adopted_models", "rounding", "comparison", "schedule", "statistics", "tables", "clock")
NO_CACHE = shutil.ignore_patterns("__pycache__")


def python(code: str, cwd: Path, *path: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def test_a_wheel_is_one_package_that_asks_for_torch_and_triton_and_runs_beside_other_peoples_ops_and_model(tmp_path):
    pytest.importorskip("setuptools")
    source, wheels, target, here = (tmp_path / name for name in ("source", "wheels", "target", "here"))
    for name in ("ops", "model", "data", "configs", "training", "ablation", "benchmarks", "measure", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=NO_CACHE)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = python(BUILD, source, arguments=(str(wheels),))
    assert done.returncode == 0, done.stderr
    [wheel] = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(target)  # as `pip install --target` does

    assert [path.name for path in target.iterdir() if path.suffix != ".dist-info"] == ["prenorm"]
    modules = {path.relative_to(ROOT / "ops") for path in (ROOT / "ops").rglob("*.*") if path.suffix in (".py", ".typed")}
    modules |= {Path("check", f"{name}.py") for name in ("__init__", *CHECK)}
    assert {path.relative_to(target / "prenorm") for path in (target / "prenorm").rglob("*.*")} == modules
    [metadata] = target.glob("*.dist-info/METADATA")
    needs = [line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert [need.split()[1].split(">")[0] for need in needs] == ["torch", "triton"]

    for copy in ("theirs/ops", "a_b", "a/b"):
        shutil.copytree(ROOT / "ops", here / copy, ignore=NO_CACHE)
    for name in ("ops", "model", "data"):
        (here / f"{name}.py").write_text("mine = True\n")
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
    done = python(code, here, here, target)
    assert done.stdout == "1: LayerNorm(32) → fused (LayerNorm, eps 1e-05)\n"
    refused = "ImportError: a.b: this process has operators called prenorm_a_b already"  # copies that can't live together
    assert done.stderr.splitlines()[-1].startswith(refused), done.stderr


def test_a_source_distribution_builds_the_same_wheel_and_has_no_tests(tmp_path):
    pytest.importorskip("setuptools")
    source, made, unpacked = (tmp_path / name for name in ("source", "made", "unpacked"))
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "results"))
    done = python(BUILD.replace("build_wheel", "build_sdist"), source, arguments=(str(made),))
    assert done.returncode == 0, done.stderr
    [archive] = made.iterdir()
    shutil.unpack_archive(archive, unpacked, filter="data")
    [folder] = unpacked.iterdir()
    assert not list(folder.rglob("test*.py"))
    done = python(BUILD, folder, arguments=(str(made),))
    assert done.returncode == 0, done.stderr
    [wheel] = made.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"prenorm/py.typed", "prenorm/adopt/lazy.py", "prenorm/check/adoption.py"} <= set(names)
