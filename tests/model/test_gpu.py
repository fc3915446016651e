"""The kernels inside a compiled model, and attention's memory; the same kernels in an eager one: test_norm.py."""

import pytest
import torch

pytestmark = pytest.mark.gpu

OPTIONS = {"width": 128, "dropout": 0.2, "attention_dropout": 0.0, "drop_path": 0.5, "qk_norm": True, "positions": "rotary"}


@pytest.mark.parametrize("residual_dtype", ["fp32", "compute"])
@pytest.mark.parametrize("block", ["sequential", "parallel"])
@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_compiled_equals_eager_under_bf16(build, batch, impl, block, residual_dtype):
    options = {"block": block, "residual_dtype": residual_dtype, "norm_impl": impl, "kv_heads": 2}
    model = build(**OPTIONS | options, norm_dropout_masks="shared").cuda()
    batch, seeds = [t.cuda() for t in batch], torch.arange(model.dropout_sites, device="cuda")
    torch._dynamo.reset()
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.compile(model, fullgraph=True)(*batch, seeds)
        expected = model(*batch, seeds)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2**-8)  # an ulp of bf16 at 1, on a loss near 4
    assert all(p.grad is not None for p in model.parameters())


def test_grouped_query_in_fp32_does_not_materialise_the_attention_weights(build):
    model = build(kv_heads=2, context=4096, layers=1).cuda()
    tokens = torch.zeros(1, 4096, dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    model(tokens, tokens).backward()
    weights = 4 * 4096**2 * 4  # heads × T² fp32
    assert torch.cuda.max_memory_allocated() < weights
