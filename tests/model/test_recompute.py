"""train.recompute: blocks computed again in backward give the gradients of those that were kept, bit for bit."""

import pytest
import torch

from configs.schema import BlockLayout, DropoutMasks, ModelConfig, NormConfig, NormImpl
from model import GPT


@pytest.mark.parametrize("block", BlockLayout)
@pytest.mark.parametrize("impl", NormImpl)
@pytest.mark.parametrize("masks", DropoutMasks)
def test_gradients_have_the_same_bits_with_and_without_and_blocks_run_twice(block, impl, masks):
    sizes = ModelConfig(layers=2, heads=2, width=32, context=16, dropout=0.3, drop_path=0.2, block=block)
    torch.manual_seed(0)
    model = GPT(sizes, NormConfig(impl=impl, dropout_masks=masks), vocab_size=50)
    tokens = torch.randint(50, (4, 16))
    runs = []
    model.blocks[0].attention.register_forward_pre_hook(lambda *_: runs.append(1))

    def gradients(recompute):
        model.recompute = recompute
        model.zero_grad()
        runs.clear()
        torch.manual_seed(1)
        loss = model(tokens, tokens, seeds=torch.arange(model.dropout_sites))
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())], len(runs)

    kept, once = gradients(False)
    again, twice = gradients(True)

    assert (once, twice) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
