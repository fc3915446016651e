"""What the compiler makes of the rotary kernels for an H100, on a machine without one.

As a program (`python -m tests.ops.test_rotary_offline`) it compiles, and prints a line of JSON for each launch.
"""

import json

import torch

from .offline import OfflineLauncher, launches_of, prepare

CASES: dict[str, dict] = {
    "12/12x64": {"heads": (12, 12), "D": 64},
    "8/4x256 layernorm": {"heads": (8, 4), "D": 256, "norm": "layernorm"},
    "12/12x80, R = 32": {"heads": (12, 12), "D": 80, "R": 32},
    "12/12x64 turned only": {"heads": (12, 12), "D": 64, "norm": None},
}
TOKENS = {"12/12x64": [(2, 1), (1, 64), (3, 7)]}  # of which Triton could make 1, a multiple of 16, another


def test_what_the_launches_are_compiled_to():
    launches = launches_of("test_rotary_offline")
    assert {launch["case"] for launch in launches} == set(CASES)

    for launch in launches:
        assert launch["spilled"] <= 16, launch
        assert launch["before_waiting"] == [], launch  # what starts early touches no memory before it has waited
        if launch["kernel"].startswith("rotary_"):  # large tensors are written 16 bytes at a time
            partials = {"STG.E", "STG.E.64"} if "backward" in launch["kernel"] else set()
            assert set(launch["stores"]) - partials == {"STG.E.128"}, launch

    # a new number of tokens compiles nothing
    for kernel in ("rotary_forward_kernel", "rotary_backward_kernel", "finish_rotary_weights_kernel"):
        alike = [launch["compilation"] for launch in launches if launch["case"] in TOKENS and launch["kernel"] == kernel]
        assert len(alike) == 3 and len(set(alike)) == 1, kernel


def main() -> None:
    from ops import rotary

    prepare()
    for name, case in CASES.items():
        (heads, kv_heads), D = case["heads"], case["D"]
        norm = case.get("norm", "rmsnorm")
        weight = None if norm is None else torch.rand(D).requires_grad_()
        for B, T in TOKENS.get(name, [(2, 64)]):
            qkv = torch.randn(B, T, (heads + 2 * kv_heads) * D, dtype=torch.bfloat16).requires_grad_()
            table = torch.rand(T, case.get("R", D) // 2)
            outputs = rotary.rotary_qkv_fn(qkv, table, table, heads, kv_heads, norm=norm, q_weight=weight, k_weight=weight)
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        for found in OfflineLauncher.found:
            print(json.dumps({"case": name, **found}), flush=True)
        OfflineLauncher.found.clear()


if __name__ == "__main__":
    main()
