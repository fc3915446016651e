"""What a block hands to its parts: a fused block hands them the same, or is refused."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from ops import BlockLayout, fuse_prenorm_block, restore_norms
from ops.adopt.norms import AdoptedNorm

from .lookalikes import Llama, like
from .toys import LAYOUT, N, Sublayer, block_of, block_that_drops, first_half, nothing, second_half

HANDS_ON = {
    "nothing": nothing,
    "a constant": lambda self, x: second_half(self, first_half(self, x, causal=self.flag)),
    "with another default": lambda self, x, causal=True: second_half(self, first_half(self, x, causal=causal)),
    "renamed": lambda self, x, factor=1.0, *, unused=None: second_half(self, first_half(self, x, factor)),
    "needed": lambda self, x, scale: second_half(self, first_half(self, x, scale)),
    "any name": lambda self, x, **kwargs: second_half(self, first_half(self, x, **kwargs)),
    "doubled": lambda self, x, scale=1.0: second_half(self, first_half(self, x, scale=2 * scale)),
}


@pytest.mark.parametrize(
    ("what", "args", "kwargs"),
    [
        ("a constant", (), {}),
        ("with another default", (), {}),
        ("with another default", (False,), {}),
        ("renamed", (3.0,), {}),
        ("renamed", (), {"factor": 3.0, "unused": None}),
        ("needed", (3.0,), {}),
        ("any name", (), {"scale": 3.0, "causal": True}),
    ],
)
def test_the_mixer_gets_what_the_block_would_have_given_it(what, args, kwargs, device):
    block, x = block_of(HANDS_ON[what], flag=True).to(device), torch.randn(2, 3, N, device=device)
    expected = block(x, *args, **kwargs)
    fuse_prenorm_block(block, LAYOUT)
    pending = block(x, *args, **kwargs)
    torch.testing.assert_close(pending.hidden + pending.residual, expected)


@pytest.mark.parametrize(
    ("what", "args", "kwargs", "why"),
    [
        ("doubled", (3.0,), {}, "argument scale is a float; the block's own forward did not just hand it to its mixer"),
        ("nothing", (), {"scale": 3.0}, "argument scale is a float"),
        ("renamed", (), {"unused": 1}, "argument unused is a int"),
        ("needed", (), {}, "misses scale"),
        ("needed", (1.0, 2.0), {}, "takes x, scale by position, got 3 arguments"),
    ],
)
def test_an_argument_that_would_be_lost_raises(what, args, kwargs, why):
    block = block_of(HANDS_ON[what])
    fuse_prenorm_block(block, LAYOUT)
    with pytest.raises(TypeError, match=re.escape(why)):
        block(torch.zeros(2, 3, N), *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_trying_a_block_and_its_norms_follows_no_default_dtype_or_device(dtype):
    block = block_of(HANDS_ON["any name"], ln_2=Llama(N))
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            fuse_prenorm_block(block, LAYOUT)
    finally:
        torch.set_default_dtype(torch.float32)
    assert block(torch.randn(2, N), causal=True).hidden.shape == (2, N)
    assert [str(norm.formula) for norm in (block.ln_1, block.ln_2)] == ["LayerNorm, eps 1e-05", "RMSNorm, eps 1e-06"]


@pytest.mark.parametrize(("second", "said"), [("drop", None), ("drop2", None), ("drop2", "drop")])
def test_dropouts_that_the_layout_leaves_out_are_refused_with_the_layout_that_names_them(second, said):
    block, layout = block_that_drops(second, drop2=nn.Dropout(0.2)), replace(LAYOUT, dropout1=said)
    if second == "drop":
        del block.drop2
    with pytest.raises(ValueError, match="of which layout says nothing; if that is what drops behind") as refused:
        fuse_prenorm_block(block, layout)
    suggested = re.search(r"BlockLayout\(.*?\)", str(refused.value)).group()
    fuse_prenorm_block(block, eval(suggested, {"BlockLayout": BlockLayout}))  # it is Python as it stands
    assert (block.layout.dropout1, block.layout.dropout2) == ("drop", second)


class NeedsMask(nn.Module):
    """Attention that needs a mask or None, has running statistics, and drops its weights as well."""

    def __init__(self):
        super().__init__()
        self.norm, self.weights_dropout, self.dropout = nn.BatchNorm1d(N), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x, mask):
        x = self.norm(x.flatten(0, -2)).view_as(x)
        weights = x @ x.mT if mask is None else x @ x.mT + mask
        return self.dropout(self.weights_dropout(weights.softmax(-1)) @ x)


def test_a_sublayer_that_needs_more_than_x_is_tried_without_it_and_keeps_its_buffers():
    block = block_of(HANDS_ON["needed"], attn=NeedsMask())
    before = [buffer.clone() for buffer in block.attn.buffers()]
    with pytest.raises(ValueError, match=r"layout\.dropout1 is not the last that happens in its sublayer"):
        fuse_prenorm_block(block, replace(LAYOUT, dropout1="attn.weights_dropout"))
    fuse_prenorm_block(block, replace(LAYOUT, dropout1="attn.dropout"))
    assert before and all(map(torch.equal, block.attn.buffers(), before))


def test_a_sublayer_that_does_something_else_without_its_arguments_is_taken_at_the_layouts_word():
    drops_with_a_mask = like(NeedsMask(), lambda self, x, mask: x if mask is None else NeedsMask.forward(self, x, mask))
    block = block_of(HANDS_ON["needed"], attn=drops_with_a_mask)
    fuse_prenorm_block(block, replace(LAYOUT, dropout1="attn.dropout"))
    assert restore_norms(block, verbose=False)


def test_trying_a_block_and_its_parts_compiles_nothing():
    compiled = []

    def compile(forward):
        return torch.compile(forward, backend=lambda graph, _: compiled.append(graph) or graph.forward)

    mlp = like(Sublayer(), compile(Sublayer.forward))
    norms = {name: like(Llama(N), compile(Llama.forward)) for name in ("ln_1", "ln_2")}
    block = block_of(compile(nothing), mlp=mlp, **norms)
    fuse_prenorm_block(block, replace(LAYOUT, dropout2="mlp.dropout"))
    assert isinstance(block.ln_1, AdoptedNorm) and not compiled
