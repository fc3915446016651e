"""Norms of other libraries, called as their interfaces say; what they can't do is refused: tests/configs/test_errors.py."""

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.parametrize("residual_dtype", ["fp32", "compute"])
@pytest.mark.parametrize(
    ("impl", "package", "options"),
    [
        ("flash_attn", "flash_attn", {"norm_kind": "layernorm"}),
        ("flash_attn", "flash_attn", {"norm_kind": "rmsnorm", "block": "parallel"}),
        ("liger", "liger_kernel", {"norm_kind": "layernorm", "bias": False}),
        ("liger", "liger_kernel", {"norm_kind": "rmsnorm"}),
        ("quack", "quack", {"norm_kind": "rmsnorm"}),
    ],
)
def test_a_librarys_model_is_torchs_up_to_rounding(build, batch, impl, package, options, residual_dtype):
    pytest.importorskip(package)
    models = [build(norm_impl=name, residual_dtype=residual_dtype, width=128, **options).cuda() for name in (impl, "torch")]
    with torch.autocast("cuda", torch.bfloat16):
        losses = [model(*(part.cuda() for part in batch)) for model in models]
    torch.testing.assert_close(*losses, atol=2**-7, rtol=0)
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=3e-3, rtol=0.05)
