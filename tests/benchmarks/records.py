"""Made-up records of the shape that the programs write, and sizes to make real ones by."""

import math

SMALL = ["model.layers=2", "model.heads=2", "model.width=32", "model.context=16", "model.vocab_size=64", "tokenizer=char"]
ENVIRONMENT = {
    "git": {"revision": "0123456789abcdef", "dirty": False},
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "quack-kernels": "0.6.5"},
    "cuda": "13.0", "hip": None, "gpu": {"name": "NVIDIA H200", "driver": "580"},
}  # fmt: skip
SHARES = {"traffic": 0.97, "ours": 0.97, "torch": 0.5, "compile": 0.8, "flash-attn": 0.78, "liger-kernel": 0.7}
SHARES |= {"quack-kernels": 0.93}


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
    """All providers as smooth curves."""
    return [
        norm(case, n, name, max(0.05, share - 0.1 * math.cos(math.log2(n))), direction=direction, residual=residual)
        for direction in ("forward", "backward")
        for case in cases
        for residual in (("bf16", "fp32") if "add" in case else (None,))
        for n in widths
        for name, share in SHARES.items()
    ]
