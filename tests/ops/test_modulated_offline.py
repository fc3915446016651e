"""What the compiler makes of the kernels of modulated norms for an H100, on a machine without one.

As a program (`python -m tests.ops.test_modulated_offline`) it compiles, and prints a line of JSON for each launch.
"""

import json

import torch

from .offline import OfflineLauncher, launches_of, prepare

BF16, FP32 = torch.bfloat16, torch.float32
CASES: dict[str, dict] = {
    "adaln": {"stream": None, "N": 768},
    "adaln_zero": {"stream": BF16, "N": 1152},
    "adaln_zero fp32 affine": {"stream": FP32, "N": 1536, "affine": True},
    "wide": {"stream": BF16, "N": 5120},
}
ROWS = {"adaln_zero": [(2, 1), (1, 64), (3, 7)]}  # of which Triton could make 1, a multiple of 16, another


def test_what_the_launches_are_compiled_to():
    launches = launches_of("test_modulated_offline")
    assert {launch["case"] for launch in launches} == set(CASES)

    for launch in launches:
        assert launch["spilled"] <= 16, launch
        assert launch["before_waiting"] == [], launch  # what starts early touches no memory before it has waited

    # a new number of samples or tokens compiles nothing
    for kernel in ("modulated_forward_kernel", "modulated_backward_kernel"):
        alike = [launch["compilation"] for launch in launches if launch["case"] in ROWS and launch["kernel"] == kernel]
        assert len(alike) == 3 and len(set(alike)) == 1, kernel


def main() -> None:
    from ops import modulated_norm_fn

    prepare()
    for name, case in CASES.items():
        N, stream = case["N"], case["stream"]
        affine = [torch.ones(N, requires_grad=True) for _ in range(2)] if case.get("affine") else []
        for B, T in ROWS.get(name, [(2, 64)]):
            x, residual = (torch.randn(B, T, N, requires_grad=True) for _ in range(2))
            scale, shift, gate = torch.randn(B, 3 * N, dtype=BF16, requires_grad=True).chunk(3, -1)
            sum_ = [residual.to(stream), gate] if stream else []
            outputs = modulated_norm_fn(x.to(BF16), scale, shift, *sum_, *affine, prenorm=True)
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        for found in OfflineLauncher.found:
            print(json.dumps({"case": name, **found}), flush=True)
        OfflineLauncher.found.clear()


if __name__ == "__main__":
    main()
