"""Made-up records of the shape that the programs write, and sizes to make real ones by."""

SMALL = ["model.layers=2", "model.heads=2", "model.width=32", "model.context=16", "model.vocab_size=64", "tokenizer=char"]
ENVIRONMENT = {
    "git": {"revision": "0123456789abcdef", "dirty": False},
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "quack-kernels": "0.6.5"},
    "cuda": "13.0", "hip": None, "gpu": {"name": "NVIDIA H200", "driver": "580"},
}  # fmt: skip


def norm(case, n, provider, share, *, direction="forward", residual=None, weights="bf16", **more):
    return {
        "case": case, "direction": direction, "residual_dtype": residual, "weight_dtype": weights, "M": 32768, "N": n,
        "provider": provider, "bytes": 1, "copy_gb_per_s": 4250.0, "us": 10 / share, "p10": 9 / share,
        "p90": 11 / share, "gb_per_s": 4250 * share, "share": share,
        "times_ours_95": [0.96 / share, 0.98 / share], **more,
    }  # fmt: skip
