"""Compiles the launches of some calls for a GPU that need not be there, and says what registers they take.

A program, because in the tests' own process kernels belong to the interpreter: `python -m tests.ops.offline` prints a line of
JSON a kernel. What only the compiler sees it finds without a GPU: arguments that become constants, registers that spill, the
order of instructions.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info

import ops
from ops import launch, tiling

from .cases import BF16, FP16, FP32, Case, describe, inputs, ours

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32", torch.int64: "*i64", torch.bool: "*i1"}
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Every class of tile, and the width at which arguments become constants.
CASES = [
    Case(n=1, m=3),
    Case(n=768, m=64, residual=None),  # fp32 weights, beside a tile measured with those of 16 bits
    Case(n=768, m=64, residual=None, weight=BF16),
    Case(n=1024, m=64, rms=True, residual=BF16, weight=BF16, bias=False, dropout_p=0.1),
    Case(n=1024, m=64, rms=True, residual=None, weight=BF16, bias=False),  # asks for eight rows in one piece
    Case(n=1000, m=64, rms=True, residual=BF16, weight=BF16, bias=False),  # 8 divides it, and not 16
    Case(n=1500, m=64, residual=None, weight=BF16),  # does not fill its blocks
    Case(n=1600, m=64, residual=FP32, weight=BF16, dropout_p=0.1),
    Case(n=2048, m=64, residual=FP32, weight=BF16),  # backward changes the layout of its rows in shared memory
    Case(n=8192, m=64, rms=True, residual=None, weight=BF16, bias=False),
    Case(n=8192, m=64, rms=True, residual=BF16, bias=False),  # fp32 weights, which backward reads with each tile
    Case(n=8192, m=64, x=FP16, residual=None, weight=FP16),
    Case(n=12288, m=64, residual=None, weight=BF16),  # past L1
    Case(n=65536, m=8, rms=True, residual=BF16, weight=BF16, bias=False),
    Case(n=65536, m=8, residual=None, weight=BF16),  # past L1, with its bias
    Case(n=65536, m=8, residual=FP32, weight=BF16, dropout_p=0.1),
]

ROWS_READ = {"norm_forward_kernel": ("p_x", "p_x1", "p_residual"), "norm_backward_kernel": ("p_dy", "p_dy1", "p_dr", "p_r")}


class OfflineLauncher(launch.Launcher):
    """Compiles what it is asked to start."""

    case = ""  # whose launches come now
    staged = 0  # bytes of shared memory that `tiling` counts for backward's program

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        kernel = self.kernel
        options = {name: value for name, value in self.constants.items() if name not in kernel.arg_names}
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        divisible: dict[tuple[int], list] = {}
        given = (*tensors, *self.scalars)
        arguments = (*given, *(self.constants[name] for name in kernel.arg_names[len(given) :]))
        for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
            signature[parameter.name] = "constexpr"
            if (
                parameter.is_constexpr
                or value is None
                or (type(value) is int and value == 1 and not parameter.do_not_specialize)
            ):
                constants[i,] = value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name], aligned = TYPES[value.dtype], not parameter.do_not_specialize_on_alignment
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i64" if value >= 2**31 else "i32"
                aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                divisible[i,] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=divisible)
        compiled = triton.compile(source, target=TARGET, options=options)
        found = {"kernel": kernel.__name__, "case": self.case, "early_start": self.constants["EARLY_START"]}
        found["before_waiting"] = before_waiting(compiled.asm["sass"])
        found["early_weights"] = self.constants.get("EARLY", False)
        found["behind_sums"] = behind_sums(compiled.asm["sass"])
        found["past_l1"] = self.constants.get("PAST_L1", False), self.constants.get("BIAS_PAST_L1", False)
        found["reads_past_l1"] = len(re.findall(r"ld\.global\.cg\b", compiled.asm["ptx"]))
        rows = ROWS_READ.get(kernel.__name__, ())
        read = sum(value is not None for name, value in zip(kernel.arg_names, given, strict=False) if name in rows)
        pieces = 1 if self.constants.get("AT_ONCE") else self.constants.get("ROWS", 1)
        found["prefetch"] = read * pieces if self.constants.get("PREFETCH") else 0
        found["at_once"] = self.constants.get("AT_ONCE", False)
        found["prefetches"] = compiled.asm["sass"].count("UBLKPF.L2")
        found["splits"] = self.constants.get("SLICES", 1) > 1
        found["passing_stores"] = len(re.findall(r"st\.global\.cs\b", compiled.asm["ptx"]))
        found["two_bytes"] = len(re.findall(r"\b(?:LDG|STG)\.E(?:\.\w+)*?\.U16\b", compiled.asm["sass"]))
        found["shared"], found["staged"] = compiled.metadata.shared, self.staged
        print(json.dumps(found | usage(compiled.asm["cubin"])), flush=True)


def before_waiting(sass: str) -> list[str] | None:
    """What reads or writes memory ahead of the wait for the kernel before; None where nothing waits."""
    ahead, wait, _ = sass.partition("ACQBULK")
    return re.findall(r"\b(?:LDG|LDGSTS|LD|STG|ST|RED|ATOM|ATOMG|UBLKCP|UBLKPF)\b.*", ahead) if wait else None


def behind_sums(sass: str) -> list[str] | None:
    """What is read after the threads of a warp have begun to add up a row; None where they do not."""
    _, sums, behind = sass.partition("SHFL")
    return re.findall(r"\bLDG\b.*", behind) if sums else None


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes of its stack: what it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "spilled": int(found[2])}


def main() -> None:
    def current_target() -> GPUTarget:
        return TARGET

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
    target_info.current_target = current_target
    launch.Launcher = OfflineLauncher  # type: ignore[misc]
    launch.device_facts = lambda device: tiling.H200  # type: ignore[assignment]
    backward_tile = launch.backward_tile

    def counted(n: int, work: tiling.Work, device: tiling.Device) -> tiling.Tile:
        tile = backward_tile(n, work, device)
        OfflineLauncher.staged = tiling.staged_bytes(tile, work, device)
        return tile

    launch.backward_tile = counted
    for module in [module for name, module in sys.modules.items() if name.startswith(ops.__name__ + ".")]:
        if hasattr(module, "runs_kernels"):
            module.runs_kernels = lambda device: True  # type: ignore[attr-defined]
    for case in CASES:
        OfflineLauncher.case = describe(case)
        ours(inputs(case, torch.device("cpu")), case)


if __name__ == "__main__":
    main()
