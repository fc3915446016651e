"""Made-up records of the shape that the programs write."""

import math

ENVIRONMENT = {
    "git": {"revision": "0123456789abcdef", "dirty": False},
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "quack-kernels": "0.6.5"},
    "cuda": "13.0", "hip": None, "gpu": {"name": "NVIDIA H200", "driver": "580"},
}  # fmt: skip

SHARES = {
    "traffic": 0.97,
    "ours": 0.97,
    "torch": 0.5,
    "compile": 0.8,
    "flash-attn": 0.78,
    "liger-kernel": 0.7,
    "quack-kernels": 0.93,
    "apex": 0.3,
}


def norm(case, n, provider, share, *, direction="forward", residual=None, m=32768, asked=None, weights="bf16", **more):
    return {
        "case": case, "direction": direction, "residual_dtype": residual, "weight_dtype": weights, "M": m, "N": n,
        "asked_rows": asked or m, "provider": provider, "bytes": 1, "copy_gb_per_s": 4250.0, "us": 10 / share, "p10": 9 / share,
        "p90": 11 / share, "gb_per_s": 4250 * share, "share": share,
        "times_ours_95": [0.96 / share, 0.98 / share], **more,
    }  # fmt: skip


def failed(case, n, provider, error="OutOfMemoryError: no", **where):
    return {**norm(case, n, provider, 1.0, **where), "us": None, "share": None, "error": error}


def sweep(cases=("ln", "add_rms", "dropout_add_ln"), widths=(768, 1024, 4096, 16384, 65536)):
    """All providers; seven times out of eight as smooth curves."""
    records = []
    for direction in ("forward", "backward"):
        for case in cases:
            for residual in ("bf16", "fp32") if "add" in case else (None,):
                for n in widths:
                    for i, (name, share) in enumerate(SHARES.items()):
                        if name == "apex" and "add" in case:
                            continue
                        bend = 0.12 * math.cos(math.log2(n) + i) - (0.15 if direction == "backward" else 0)
                        value = min(1.01, max(0.05, share + bend * (1.2 - share)))
                        m = min(32768, 2**29 // n)
                        records.append(norm(case, n, name, value, direction=direction, residual=residual, m=m, asked=32768))
    return records
