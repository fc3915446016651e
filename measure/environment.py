"""The facts that numbers depend on: code, versions, machine."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from measure.sources import ROOT

PACKAGES = ("prenorm", "torch", "triton", "numpy", "datasets", "tokenizers", "wandb")
LIBRARIES = {  # that norms, losses and models are compared with: their modules
    "flash-attn": "flash_attn", "liger-kernel": "liger_kernel", "quack-kernels": "quack", "transformers": "transformers",
}  # fmt: skip


def environment(device: torch.device) -> dict[str, Any]:
    """Facts for environment.json. None: the machine does not tell."""
    facts: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": git_state(ROOT),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": cpus(),
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in PACKAGES} | libraries(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.distributed.is_nccl_available():
            facts["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["gpu"] = {
            "name": properties.name,
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    return facts


def libraries() -> dict[str, str]:
    """The versions of the LIBRARIES that this process has imported; one that was copied, not installed, may still have one."""
    there = {name: sys.modules[module] for name, module in LIBRARIES.items() if module in sys.modules}
    return {name: _version(name) or str(getattr(module, "__version__", "unknown")) for name, module in there.items()}


def cpus() -> int:
    """Cores that this process may use: a job of a cluster has few of its node's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_state(folder: Path, apart: Sequence[str] = ()) -> dict[str, Any] | None:
    """Revision, and whether tracked files differ from it, but for those `apart`. Outside a git repository that of GIT_REVISION,
    or None."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        given = os.environ.get("GIT_REVISION")  # of code that was copied without its repository
        return {"revision": given, "dirty": False} if given else None
    paths = [".", *(f":!{path}" for path in apart)]
    return {"revision": revision, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", *paths))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        # another user's checkout is read too; none of its programs is run
        command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The release of NVIDIA's driver, read from the kernel: nvidia-smi takes seconds on some machines."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)
