"""train.recompute: blocks computed again in backward give the same gradients, bit for bit."""

import pytest
import torch


@pytest.mark.parametrize(("block", "impl"), [("sequential", "fused"), ("parallel", "torch")])
@pytest.mark.parametrize("masks", ["native", "shared"])
def test_gradients_have_the_same_bits_with_and_without_and_blocks_run_twice(build, batch, block, impl, masks):
    model = build(dropout=0.3, drop_path=0.2, block=block, norm_impl=impl, norm_dropout_masks=masks)
    runs, found = [], []
    model.blocks[0].attention.register_forward_pre_hook(lambda *_: runs.append(model.recompute))
    for model.recompute in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(*batch, seeds=torch.arange(model.dropout_sites))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])

    assert runs == [False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
