"""What the compiler makes of the rotary kernels for an H100, on a machine without one.

As a program (`python -m tests.ops.test_rotary_offline`) it compiles, and prints a line of JSON for each launch.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import torch

CASES: dict[str, dict] = {
    "12/12x64": {"heads": (12, 12), "D": 64},
    "32/8x128": {"heads": (32, 8), "D": 128},
    "8/4x256 layernorm": {"heads": (8, 4), "D": 256, "norm": "layernorm"},
    "12/12x80, R = 32": {"heads": (12, 12), "D": 80, "R": 32},
    "12/12x64 interleaved": {"heads": (12, 12), "D": 64, "interleaved": True},
    "12/12x64 turned only": {"heads": (12, 12), "D": 64, "norm": None},
}
TOKENS = {"12/12x64": [(2, 1), (1, 64), (3, 7)]}  # of which Triton could make 1, a multiple of 16, another


def test_what_the_launches_are_compiled_to():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.test_rotary_offline"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    launches = [json.loads(line) for line in done.stdout.splitlines()]
    assert {launch["case"] for launch in launches} == set(CASES)

    for launch in launches:
        assert launch["spilled"] <= 16, launch
        if launch["kernel"].startswith("rotary_"):  # large tensors are read and written 16 bytes at a time
            assert set(launch["stores"]) - set(launch["partials"]) == {"STG.E.128"}, launch

    # a new number of tokens compiles nothing
    for kernel in ("rotary_forward_kernel", "rotary_backward_kernel", "finish_rotary_weights_kernel"):
        alike = [launch["hash"] for launch in launches if launch["case"] in TOKENS and launch["kernel"] == kernel]
        assert len(alike) == 3 and len(set(alike)) == 1, kernel

    # Backward asks for a tile before it works on it: two halves of dq and of x, and four times 16 bytes of the tables, of which
    # the last may come late: they are in cache.
    for launch in launches:
        if launch["kernel"] == "rotary_backward_kernel" and "turned only" not in launch["case"]:
            runs = re.findall(r"(?:L\.*)+", launch["order"])
            assert sum(run.count("L") >= 7 for run in runs) >= 2, launch  # of queries, and of keys


def compile_case(name: str, launch_module, rotary) -> None:
    from triton import knobs

    case = CASES[name]
    (heads, kv_heads), D = case["heads"], case["D"]
    R = case.get("R", D)

    def start(self, *pointers) -> None:
        compiled = self.kernel.run(*pointers, *self.rest, grid=(1,), warmup=True, **self.options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert used
        operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)", text)
        marks = {"LDG": "L", "SHFL": "S", "BAR": "B", "STG": "W"}
        found = {
            "case": name,
            "kernel": self.kernel.__name__,
            "registers": int(used[1]),
            "spilled": int(used[2]),
            "stores": sorted({o for o in operations if o.startswith("STG")}),
            "partials": ["STG.E", "STG.E.64"] if "backward" in self.kernel.__name__ else [],
            "order": "".join(marks.get(o.split(".")[0], ".") for o in operations),
            "hash": compiled.hash,
        }
        print(json.dumps(found), flush=True)

    launch_module.Launch.start = start
    weight = None if case.get("norm", "rmsnorm") is None else torch.rand(D).requires_grad_()
    for B, T in TOKENS.get(name, [(2, 64)]):
        qkv = torch.randn(B, T, (heads + 2 * kv_heads) * D, dtype=torch.bfloat16).requires_grad_()
        table = torch.rand(T, R // 2)
        outputs = rotary.rotary_qkv_fn(
            qkv, table, table, heads, kv_heads, norm=case.get("norm", "rmsnorm"), q_weight=weight, k_weight=weight,
            interleaved=case.get("interleaved", False),
        )  # fmt: skip
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def main() -> None:
    from types import SimpleNamespace

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from ops import rotary, rotary_launch, tiling

    driver.set_active(
        SimpleNamespace(  # Triton's driver as far as a compilation asks it
            get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda d: 0
        )
    )
    rotary_launch.device_facts = lambda device: tiling.H200  # type: ignore[assignment]
    rotary.runs_kernels = lambda device: True  # type: ignore[assignment]
    for name in CASES:
        compile_case(name, rotary_launch, rotary)


if __name__ == "__main__":
    main()
