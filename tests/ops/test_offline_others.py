"""What the compiler makes of the kernels of rotary positions and of modulated norms for an H100, on a machine without one.

As a program (`python -m tests.ops.test_offline_others`) it compiles, and prints a line of JSON for each launch.
"""

import json
from functools import partial

import torch

from .cases import BF16, FP32
from .offline import OfflineLauncher, launches_of, prepare


def rotary(B, T, heads, D, R=None, norm="rmsnorm"):
    from ops import rotary_qkv_fn

    heads, kv_heads = heads
    weight = None if norm is None else torch.rand(D).requires_grad_()
    qkv = torch.randn(B, T, (heads + 2 * kv_heads) * D, dtype=BF16).requires_grad_()
    table = torch.rand(T, (R or D) // 2)
    return rotary_qkv_fn(qkv, table, table, heads, kv_heads, norm=norm, q_weight=weight, k_weight=weight)


def modulated(B, T, N, stream=None, affine=False):
    from ops import modulated_norm_fn

    weights = [torch.ones(N, requires_grad=True) for _ in range(2 * affine)]
    x, residual = (torch.randn(B, T, N, requires_grad=True) for _ in range(2))
    scale, shift, gate = torch.randn(B, 3 * N, dtype=BF16, requires_grad=True).chunk(3, -1)
    sum_ = [residual.to(stream), gate] if stream else []
    return modulated_norm_fn(x.to(BF16), scale, shift, *sum_, *weights, prenorm=True)


CASES = {
    "12/12x64": partial(rotary, heads=(12, 12), D=64),
    "8/4x256 layernorm": partial(rotary, heads=(8, 4), D=256, norm="layernorm"),
    "12/12x80, R = 32": partial(rotary, heads=(12, 12), D=80, R=32),
    "12/12x64 turned only": partial(rotary, heads=(12, 12), D=64, norm=None),
    "adaln": partial(modulated, N=768),
    "adaln_zero": partial(modulated, N=1152, stream=BF16),
    "adaln_zero fp32 affine": partial(modulated, N=1536, stream=FP32, affine=True),
    "wide": partial(modulated, N=5120, stream=BF16),
}
SEVERAL = ("12/12x64", "adaln_zero")  # with these samples and tokens, of which Triton could make 1, a multiple of 16, another
ROWS = [(2, 1), (1, 64), (3, 7)]
KERNELS = ("rotary_forward_kernel", "rotary_backward_kernel", "finish_rotary_weights_kernel")
KERNELS += ("modulated_forward_kernel", "modulated_backward_kernel")


def test_what_the_launches_are_compiled_to():
    launches = launches_of("test_offline_others")
    assert {launch["case"] for launch in launches} == set(CASES)

    for launch in launches:
        assert launch["spilled"] <= 32, launch
        assert launch["before_waiting"] == [], launch  # what starts early touches no memory before it has waited
        if launch["kernel"].startswith("rotary_"):  # large tensors are written 16 bytes at a time
            partials = {"STG.E", "STG.E.64"} if "backward" in launch["kernel"] else set()
            assert set(launch["stores"]) - partials == {"STG.E.128"}, launch

    # a new number of samples or tokens compiles nothing
    for kernel in KERNELS:
        alike = [launch["compilation"] for launch in launches if launch["case"] in SEVERAL and launch["kernel"] == kernel]
        assert len(alike) == len(ROWS) and len(set(alike)) == 1, kernel


def main() -> None:
    prepare()
    for name, outputs_of in CASES.items():
        for B, T in ROWS if name in SEVERAL else [(2, 64)]:
            outputs = outputs_of(B, T)
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        for found in OfflineLauncher.found:
            print(json.dumps({"case": name, **found}), flush=True)
        OfflineLauncher.found.clear()


if __name__ == "__main__":
    main()
