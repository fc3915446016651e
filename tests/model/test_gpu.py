"""What the tests beside this one claim of the reference, for the kernels inside the model, eager and compiled."""

import pytest
import torch

pytestmark = pytest.mark.gpu

OPTIONS = {"width": 128, "dropout": 0.2, "attention_dropout": 0.0, "drop_path": 0.5, "qk_norm": True, "positions": "rotary"}


@pytest.mark.parametrize("block", ["sequential", "parallel"])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_kernels_and_torch_with_shared_masks_agree(build, batch, kind, block):
    batch = [t.cuda() for t in batch]
    results = []
    for impl in ("fused", "torch"):
        model = build(**OPTIONS, block=block, norm_kind=kind, norm_impl=impl, norm_dropout_masks="shared").cuda()
        loss = model(*batch, torch.arange(model.dropout_sites, device="cuda"))
        loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, gradients), (expected, expected_gradients) = results
    assert loss == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=1e-4)


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
