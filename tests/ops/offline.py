"""Compiles the launches of many calls for an H100 or H200 that need not be there, and says what registers they take.

    python -m tests.ops.offline                          the launches that the tests look at, a line each
    python -m tests.ops.offline --all                    every width with every pair of options: about half an hour
    python -m tests.ops.offline --all --width 4096       of these, the calls at some widths
    python -m tests.ops.offline --json                   for programs: a line of JSON a launch

A program, because in the tests' own process kernels belong to the interpreter.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import ops
from measure.sources import ptx_hash
from ops import Norm, kit, norm, tiling

from .cases import BF16, FP16, FP32, OPTIONS, Case, covering, describe, inputs, ours

WIDTHS = [1000, 2304, 64, 4096, 12288, 32768]
ALL_WIDTHS = [
    1, 64, 128, 256, 384, 512, 640, 768, 1000, 1002, 1024, 1152, 1280, 1536, 1600, 1920, 2048, 2304, 2560, 2880, 3072, 3584,
    4096, 4608, 5120, 5376, 6144, 7168, 8192, 9216, 10240, 12288, 14336, 16384, 18432, 20480, 24576, 28672, 32768, 49152, 65536,
]  # fmt: skip
# What models run most: the pairs have each of these options beside others.
PLAIN = [
    Case(norm=norm, residual=r, weight=w, bias=norm == Norm.layernorm)
    for norm in Norm
    for r in (None, FP32)
    for w in (BF16, FP32)
]
# With a norm of the branch: Gemma's and OLMo's site, and what backward holds most sums of.
BRANCHES = [
    *[
        Case(norm=Norm.rmsnorm, branch=Norm.rmsnorm, residual=r, bias=False, n=n, m=3)
        for r in (BF16, FP32)
        for n in (768, 5376)
    ],
    Case(norm=Norm.none, branch=Norm.rmsnorm, dropout_p=0.1, bias=False, n=2304, m=3),
    *[Case(branch=Norm.layernorm, rowscale="learned", residual_scale=1.5, n=n, m=3) for n in (2304, 5376)],
    Case(norm=Norm.derf, branch=Norm.dyt, n=4096, m=3),
]
# Between them all that Triton may make of an integer: 1, a multiple of 16, another.
OTHER_ROWS = [Case(x=BF16, residual=BF16, dropout_p=p, n=2304, m=m) for m, p in [(64, 0.25), (1, 0.25), (35, 0.4)]]


def chosen_cases(everything: bool, widths: list[int]) -> list[Case]:
    if not everything:
        drawn = [Case(**chosen, n=n, m=3) for chosen, n in zip(covering(**OPTIONS), cycle(WIDTHS), strict=False)]
        return [case for case in (*drawn, *BRANCHES, *OTHER_ROWS) if not widths or case.n in widths]
    drawn = [Case(**chosen) for chosen in covering(**OPTIONS | {"x": [BF16, FP32, FP16]})]
    return [replace(case, n=n, m=3) for n in widths or ALL_WIDTHS for case in (*PLAIN, *drawn)]


# Triton's driver as far as a compilation asks it.
NO_GPU: Any = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda device: 0
)


class OfflineLauncher(kit.Launcher):
    """Compiles what it is asked to start, through Triton's own look at the arguments."""

    found: list[dict] = []  # noqa: RUF012
    tile: tiling.Tile | None = None  # chosen last

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Backward has its tile first, and the sum over its partial sums none.
        self.own_tile = OfflineLauncher.tile if self.kernel.__name__ != "finish_weight_gradients_kernel" else None

    def __call__(self, programs: int, tensors: tuple[torch.Tensor | None, ...], *rest: Any) -> None:
        compiled = self.kernel.run(self.record(*tensors), *rest, grid=(1,), warmup=True, **self.options)
        self.found.append(
            {
                "kernel": self.kernel.__name__,
                "warps": self.options["num_warps"],
                "shared": compiled.metadata.shared,
                "starts_early": bool(self.options.get("launch_pdl")),
                "cooperative": bool(self.options.get("launch_cooperative_grid")),
                "tile": None if self.own_tile is None else vars(self.own_tile),
                "compilation": compiled.hash,
                "ptx": ptx_hash(compiled.asm["ptx"]),
                **disassembled(compiled.asm["cubin"]),
            }
        )


@cache
def disassembled(cubin: bytes) -> dict:
    """Registers of a thread, the bytes of its stack, which is what it spills, instructions, and what touches memory before the
    wait for the kernel ahead (None where nothing waits)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert used, text[:1000]
    ahead, wait, _ = text.partition("ACQBULK")
    touched = re.findall(r"\b(?:LDG|LDGSTS|LD|STG|ST|RED|ATOM|ATOMG|UBLKCP|UBLKPF)\b.*", ahead) if wait else None
    operations = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", text, re.MULTILINE)
    return {
        "registers": int(used[1]),
        "spilled": int(used[2]),
        "instructions": len(operations),
        "before_waiting": touched,
        "stores": sorted({operation for operation in operations if operation.startswith("STG")}),
    }


def resident(found: dict) -> int:
    """Programs of a launch that one multiprocessor has registers, threads and shared memory for at a time."""
    # Each of its four parts has 16384 registers, given to whole warps, 256 at a time.
    warps = min(64, 4 * (16384 // (-(-found["registers"] // 8) * 8 * 32)))
    return min(warps // found["warps"], 233472 // (found["shared"] + 1024))


def noted(choose: Callable[..., tiling.Tile], *arguments: Any) -> tiling.Tile:
    OfflineLauncher.tile = choose(*arguments)
    return OfflineLauncher.tile


def prepare() -> None:
    driver.set_active(NO_GPU)
    kit.Launcher = OfflineLauncher  # type: ignore[misc]
    kit.device_facts = lambda device: tiling.H200  # type: ignore[assignment]
    for name in ("forward_tile", "backward_tile"):
        setattr(norm, name, partial(noted, getattr(norm, name)))
    for module in [module for name, module in sys.modules.items() if name.startswith(ops.__name__ + ".")]:
        if hasattr(module, "runs_kernels"):
            module.runs_kernels = lambda device: True  # type: ignore[attr-defined]


def compile_case(case: Case) -> list[dict]:
    """What compiling its launches found, in their order."""
    OfflineLauncher.found.clear()
    kit.forget()
    try:
        ours(inputs(case, torch.device("cpu")), case)
    except Exception as error:
        return [{"case": describe(case), "n": case.n, "error": f"{type(error).__name__}: {str(error)[-500:]}"}]
    return [{"case": describe(case), "n": case.n, **found} | {"resident": resident(found)} for found in OfflineLauncher.found]


def launches_of(program: str, *arguments: str) -> list[dict]:
    """What a program of this folder prints, in a process whose kernels do not belong to the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.ops.{program}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


NUMBERS = {"registers": 3, "spilled": 4, "instructions": 5, "shared": 6, "resident": 2}


def line(found: dict) -> str:
    if "error" in found:
        return f"{found['case']}: {found['error']}"
    tile = "" if found["tile"] is None else " ".join(f"{name}={value}" for name, value in found["tile"].items() if value)
    numbers = ", ".join(f"{found[name]:{width}d} {name}" for name, width in NUMBERS.items())
    return f"{numbers}, {found['ptx']} {found['kernel']:30s} {found['case']}   {tile}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every width with every pair of options")
    parser.add_argument("--width", type=int, nargs="*", default=[], help="calls at these widths only")
    parser.add_argument("--json", action="store_true", help="a line of JSON a launch")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilations at a time (%(default)s)")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, get_context("fork"), initializer=prepare) as pool:
        for launches in pool.map(compile_case, chosen_cases(options.all, options.width)):
            for found in launches:
                print(json.dumps(found) if options.json else line(found), flush=True)


if __name__ == "__main__":
    main()
