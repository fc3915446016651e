"""Blocks that fuse_prenorm_block refuses: they compute something else, or do more than the layout says."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import GPT2_BLOCK, BlockLayout, LayerNorm, fuse_prenorm_block

from .lookalikes import Llama, like, rms
from .toys import DROPS, LAYOUT, Block, Model, N, block_of, block_that_drops, classes, first_half, fused, nothing, second_half


def wrapped(path):
    block = Block(0.5)
    part = block.get_submodule(path)
    part.forward = lambda *args, own=part.forward: own(*args)
    return block


def with_a_dropout_of_another_block():
    first, second = Block(0.5), Block(0.5)
    second.mlp.dropout = first.mlp.dropout
    fuse_prenorm_block(first, GPT2_BLOCK)
    return second


def that_drops_its_attention_weights_too():
    block = block_that_drops()
    block.attn.weights_dropout = block.drop
    return block


def mixed(*names):
    return BlockLayout(*names), f"See whether each name in {BlockLayout(*names)} is in its place; if so, rewrite such a block"


FORM = "does not compute x + mixer(norm1(x)), then x + mlp(norm2(x))"
FORWARDS = [
    (lambda self, x: second_half(self, x + 0.3 * self.attn(self.ln_1(x))), FORM),
    (lambda self, x: self.ln_2(second_half(self, self.ln_1(x + self.attn(x)))), FORM),
    (lambda self, x: x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x)), FORM),
    (lambda self, x: nothing(self, x).clamp(-1000, 1000), FORM),
    (lambda self, x: second_half(self, x + self.attn(self.ln_1(x)).clamp(-1000, 1000)), FORM),
    (lambda self, x: second_half(self, x + F.dropout(self.attn(self.ln_1(x)), 0.1, self.training)), f"{FORM} in training"),
    (lambda self, x: (nothing(self, x), None), "returns a tuple, expected a tensor"),
    (lambda self, x: nothing(self, x) + 0 * self.mlp(x, causal=True), "its norms or its MLP get causal beside their input"),
    (lambda self, x: second_half(self, first_half(self, x, scale=x.shape[1])), "block computes scale, which it"),
    (lambda self, x: second_half(self, first_half(self, x, causal=self.training)), "block computes causal"),
    (lambda self, x: second_half(self, first_half(self, x, scale=x.mean())), "block computes scale"),
    (lambda self, x, scale: nothing(self, x), "does something else with its argument scale"),
]
DROPS_IN_THE_MIDDLE = like(Block().mlp, lambda self, x: self.linear(self.dropout(x)))
NO_NORM = like(Llama(N), lambda self, x: 2 * x / rms(x))
BY_HAND = "layout says nothing; rewrite such a block by hand"
BLOCKS = [
    (lambda: block_of(nothing, drop=nn.Dropout1d(0.1), gamma=nn.Parameter(torch.ones(N))), GPT2_BLOCK, "has drop, gamma, of"),
    (lambda: block_that_drops(more=nn.Linear(2, 2)), LAYOUT, BY_HAND),
    (lambda: block_that_drops(more=nn.Dropout1d(0.1)), LAYOUT, BY_HAND),
    (lambda: block_that_drops(more=nn.Parameter(torch.ones(2))), LAYOUT, BY_HAND),
    (lambda: block_of(nothing, ln_2=NO_NORM), LAYOUT, "layout.norm2 can't be replaced: it is neither LayerNorm nor RMSNorm"),
    (lambda: Block(norm=LayerNorm), LAYOUT, "layout.norm1 can't be replaced: it is a LayerNorm of this package"),
    (lambda: wrapped(""), GPT2_BLOCK, "the forward of block is replaced on the instance"),
    (lambda: wrapped("mlp.dropout"), GPT2_BLOCK, "the forward of layout.dropout2 is replaced on the instance"),
    (lambda: block_of(nothing, mlp=nn.Sequential()), GPT2_BLOCK, "block has no 'mlp.dropout', layout.dropout2"),
    (with_a_dropout_of_another_block, GPT2_BLOCK, "layout.dropout2 is one module with a dropout of another block"),
    (that_drops_its_attention_weights_too, DROPS, "layout.dropout1 is also attn.weights_dropout, one module"),
    (lambda: block_of(nothing, mlp=DROPS_IN_THE_MIDDLE), replace(LAYOUT, dropout2="mlp.dropout"), "is not the last that"),
    (lambda: fused(Model()).blocks[0], GPT2_BLOCK, "fused already"),
    (Block, replace(LAYOUT, norm1="norm1"), "'norm1', layout.norm1; its parts are ln_1, attn, ln_2, mlp. Describe it with"),
    (Block, *mixed("ln_2", "attn", "ln_1", "mlp")),
    (Block, *mixed("ln_1", "mlp", "ln_2", "attn")),
]  # fmt: skip


@pytest.mark.parametrize(("block", "layout", "why"), [(lambda f=f: block_of(f), LAYOUT, why) for f, why in FORWARDS] + BLOCKS)
def test_a_block_of_another_form_is_refused_and_stays_as_it_was(block, layout, why):
    block = block()
    before, state = classes(block), torch.get_rng_state()
    with pytest.raises(ValueError, match=re.escape(why)):
        fuse_prenorm_block(block, layout)
    assert classes(block) == before and torch.equal(torch.get_rng_state(), state)
    assert not any(part._forward_hooks for part in block.modules())


def test_what_is_no_block_or_no_layout_is_refused_by_name():
    with pytest.raises(TypeError, match=r"block must be a torch\.nn\.Module, got list"):
        fuse_prenorm_block([], GPT2_BLOCK)
    with pytest.raises(TypeError, match="layout must be a BlockLayout, such as LLAMA_BLOCK, got str"):
        fuse_prenorm_block(Block(), "gpt2")
