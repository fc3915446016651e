"""What a block hands to its parts: a fused block hands them the same, or is refused."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import GPT2_BLOCK, BlockLayout, fuse_prenorm_block, restore_norms

N = 16
LAYOUT = BlockLayout("norm1", "mixer", "norm2", "mlp")


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x, scale=1.0, causal=False, **ignored):
        return self.linear(x) * scale * (2.0 if causal else 1.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = nn.LayerNorm(N), Mixer(), nn.LayerNorm(N), Mixer()
        self.flag = True

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Constant(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x), causal=self.flag)
        return x + self.mlp(self.norm2(x))


class DefaultOfItsOwn(Block):
    def forward(self, x, causal=True):
        x = x + self.mixer(self.norm1(x), causal=causal)
        return x + self.mlp(self.norm2(x))


class Renamed(Block):
    def forward(self, x, factor=1.0, *, unused=None):
        x = x + self.mixer(self.norm1(x), factor)
        return x + self.mlp(self.norm2(x))


class Needed(Block):
    def forward(self, x, scale):
        x = x + self.mixer(self.norm1(x), scale=scale)
        return x + self.mlp(self.norm2(x))


class AnyName(Block):
    def forward(self, x, **kwargs):
        x = x + self.mixer(self.norm1(x), **kwargs)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("block", "args", "kwargs"),
    [
        (Constant, (), {}),
        (DefaultOfItsOwn, (), {}),
        (DefaultOfItsOwn, (False,), {}),
        (Renamed, (3.0,), {}),
        (Renamed, (), {"factor": 3.0, "unused": None}),
        (Needed, (3.0,), {}),
        (AnyName, (), {"scale": 3.0, "causal": True}),
    ],
)
def test_the_mixer_gets_what_the_block_would_have_given_it(block, args, kwargs, device):
    block, x = block().to(device), torch.randn(2, 3, N, device=device)
    expected = block(x, *args, **kwargs)
    fuse_prenorm_block(block, LAYOUT)
    pending = block(x, *args, **kwargs)
    torch.testing.assert_close(pending.hidden + pending.residual, expected)


class Doubled(Block):
    def forward(self, x, scale=1.0):
        x = x + self.mixer(self.norm1(x), scale=2 * scale)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("block", "args", "kwargs", "why"),
    [
        (Doubled, (3.0,), {}, "argument scale is a float; the block's own forward did not just hand it to its mixer"),
        (Block, (), {"scale": 3.0}, "argument scale is a float"),
        (Renamed, (), {"unused": 1}, "argument unused is a int"),
        (Needed, (), {}, "misses scale"),
        (Needed, (1.0, 2.0), {}, "takes x, scale by position, got 3 arguments"),
    ],
)
def test_an_argument_that_would_be_lost_raises(block, args, kwargs, why):
    block = block()
    fuse_prenorm_block(block, LAYOUT)
    with pytest.raises(TypeError, match=re.escape(why)):
        block(torch.zeros(2, 3, N), *args, **kwargs)


class ToTheMLP(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x), causal=True)


class FromTheShape(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x), scale=x.shape[1])
        return x + self.mlp(self.norm2(x))


class FromTheMode(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x), causal=self.training)
        return x + self.mlp(self.norm2(x))


class FromX(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x), scale=x.mean())
        return x + self.mlp(self.norm2(x))


class NeededAndUsed(Block):
    def forward(self, x, scale):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DropsByFunction(Block):
    def forward(self, x):
        x = x + F.dropout(self.mixer(self.norm1(x)), 0.1, self.training)
        return x + self.mlp(self.norm2(x))


class ClampsTheStream(Block):
    def forward(self, x):
        return super().forward(x).clamp(-1000, 1000)


class ClampsABranch(Block):
    def forward(self, x):
        x = x + self.mixer(self.norm1(x)).clamp(-1000, 1000)
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (ToTheMLP, "its norms or its MLP get causal beside their input"),
        (FromTheShape, "block computes scale, which it gives to its mixer"),
        (FromTheMode, "block computes causal"),
        (FromX, "block computes scale"),
        (NeededAndUsed, "does something else with its argument scale"),
        (ClampsTheStream, "does not compute x + mixer(norm1(x))"),
        (ClampsABranch, "does not compute x + mixer(norm1(x))"),
        (DropsByFunction, "does not compute x + mixer(norm1(x)), then x + mlp(norm2(x)) in training"),
    ],
)
def test_a_block_that_does_more_than_hand_on_is_refused(block, why):
    block, state = block(), torch.get_rng_state()
    with pytest.raises(ValueError, match=re.escape(why)):
        fuse_prenorm_block(block, LAYOUT)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_trying_a_block_follows_no_default_dtype_or_device(dtype):
    block = AnyName()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            fuse_prenorm_block(block, LAYOUT)
    finally:
        torch.set_default_dtype(torch.float32)
    assert block(torch.randn(2, N), causal=True).hidden.shape == (2, N)


class TwoDropouts(Block):
    def __init__(self):
        super().__init__()
        self.drop, self.drop2 = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.drop(self.mixer(self.norm1(x)))
        return x + self.drop2(self.mlp(self.norm2(x)))


class OneDropout(Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.mixer(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


@pytest.mark.parametrize(
    ("block", "layout", "dropouts"),
    [
        (OneDropout, LAYOUT, ("drop", "drop")),
        (TwoDropouts, LAYOUT, ("drop", "drop2")),
        (TwoDropouts, replace(LAYOUT, dropout1="drop"), ("drop", "drop2")),
    ],
)
def test_dropouts_that_the_layout_leaves_out_are_refused_with_the_layout_that_names_them(block, layout, dropouts):
    block = block()
    with pytest.raises(ValueError, match="of which layout says nothing; if that is what drops behind") as refused:
        fuse_prenorm_block(block, layout)
    suggested = re.search(r"BlockLayout\(.*?\)", str(refused.value)).group()
    fuse_prenorm_block(block, eval(suggested))  # it is Python as it stands
    assert (block.layout.dropout1, block.layout.dropout2) == dropouts


@pytest.mark.parametrize("more", [nn.Linear(2, 2), nn.Dropout1d(0.1), nn.Parameter(torch.ones(2))])
def test_no_layout_is_suggested_for_what_is_no_dropout(more):
    block = OneDropout()
    block.more = more
    with pytest.raises(ValueError, match=r"layout says nothing; rewrite such a block by hand, .* of ops/adopt/blocks\.py$"):
        fuse_prenorm_block(block, LAYOUT)


@pytest.mark.parametrize(
    "layout", [BlockLayout("norm2", "mixer", "norm1", "mlp"), BlockLayout("norm1", "mlp", "norm2", "mixer")]
)
def test_names_in_the_wrong_places_are_thought_of(layout):
    with pytest.raises(ValueError, match=re.escape("does not compute x + mixer(norm1(x)), then x + mlp(norm2(x))")) as refused:
        fuse_prenorm_block(Block(), layout)
    assert f"See whether each name in {layout} is in its place; if so, rewrite such a block by hand" in str(refused.value)


def test_a_block_of_other_names_is_asked_to_be_described():
    why = "block has no 'ln_1', layout.norm1; its parts are norm1, mixer, norm2, mlp. Describe it with a BlockLayout"
    with pytest.raises(ValueError, match=re.escape(why)):
        fuse_prenorm_block(Block(), GPT2_BLOCK)


class DropsInTheMiddle(Mixer):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.linear(self.dropout(x))


def test_a_sublayer_whose_dropout_does_not_come_last_is_refused():
    block = Block()
    block.mlp = DropsInTheMiddle()
    state, hooks = torch.get_rng_state(), len(block.mlp.dropout._forward_hooks)
    with pytest.raises(ValueError, match=r"layout\.dropout2 is not the last that happens in its sublayer"):
        fuse_prenorm_block(block, BlockLayout("norm1", "mixer", "norm2", "mlp", dropout2="mlp.dropout"))
    assert torch.equal(torch.get_rng_state(), state) and len(block.mlp.dropout._forward_hooks) == hooks


class AttendsByMask(nn.Module):
    """Attention that needs a mask or None, and drops its weights as well."""

    def __init__(self):
        super().__init__()
        self.weights_dropout, self.dropout = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x, mask):
        weights = x @ x.mT if mask is None else x @ x.mT + mask
        return self.dropout(self.weights_dropout(weights.softmax(-1)) @ x)


class NeedsMask(Block):
    def forward(self, x, mask):
        x = x + self.mixer(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


def test_a_sublayer_that_needs_more_than_x_is_tried_without_it():
    block = NeedsMask()
    block.mixer = AttendsByMask()
    with pytest.raises(ValueError, match=r"layout\.dropout1 is not the last that happens in its sublayer"):
        fuse_prenorm_block(block, BlockLayout("norm1", "mixer", "norm2", "mlp", "mixer.weights_dropout"))
    fuse_prenorm_block(block, BlockLayout("norm1", "mixer", "norm2", "mlp", "mixer.dropout"))


class Counts(nn.Module):
    """A sublayer with running statistics, that needs a mask."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(N), nn.Dropout(0.1)

    def forward(self, x, mask):
        if mask is not None:
            x = x + mask
        return self.dropout(self.norm(x.flatten(0, 1)).view_as(x))


def test_trying_a_sublayer_changes_none_of_its_buffers():
    block = NeedsMask()
    block.mixer = Counts()
    before = [buffer.clone() for buffer in block.mixer.buffers()]
    fuse_prenorm_block(block, BlockLayout("norm1", "mixer", "norm2", "mlp", "mixer.dropout"))
    assert before and all(map(torch.equal, block.mixer.buffers(), before))


class AttendsToContext(nn.Module):
    """Without a context another function, in which nothing is dropped."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, mask):
        return x if mask is None else self.dropout(x + mask)


def test_a_sublayer_that_does_something_else_without_its_arguments_is_taken_at_the_layouts_word():
    block = NeedsMask()
    block.mixer = AttendsToContext()
    fuse_prenorm_block(block, BlockLayout("norm1", "mixer", "norm2", "mlp", "mixer.dropout"))
    assert restore_norms(block, verbose=False)


def test_trying_a_sublayer_compiles_nothing():
    class Compiled(nn.Linear):
        def __init__(self):
            super().__init__(N, N)
            self.dropout = nn.Dropout(0.1)

        @torch.compile(backend="eager")
        def forward(self, x):
            return self.dropout(super().forward(x))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    block = Block()
    block.mlp = Compiled()
    fuse_prenorm_block(block, BlockLayout("norm1", "mixer", "norm2", "mlp", dropout2="mlp.dropout"))
    assert not torch._dynamo.utils.counters["stats"]
