"""Fused blocks compute what they computed, with their sums in the kernels of their norms."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ops import fuse_prenorm_block, replace_norms, restore_norms
from ops.adopting import lazy

from .lookalikes import Llama
from .toys import Block, Model, N, block_of, classes, fused, nothing, second_half

pytestmark = pytest.mark.usefixtures("kernel")


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])]


def test_a_fused_stack_computes_what_it_computed_forward_and_backward(device):
    torch.manual_seed(0)
    model = Model(norm=Llama).to(device)
    model.blocks = nn.Sequential(*model.blocks)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x, new = torch.randn(3, 4, N, device=device), fused(model)
    assert list(new.state_dict()) == list(model.state_dict()) and classes(new.blocks[0].attn) == classes(model.blocks[0].attn)
    for found, expected in zip(gradients(new, x), gradients(model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * max(1.0, expected.abs().max().item()))


def ones_of_sublayers(model):
    for block in model.blocks:
        for sublayer in (block.attn, block.mlp):
            nn.init.zeros_(sublayer.linear.weight)
            nn.init.constant_(sublayer.linear.bias, 100.0)  # tanh of it is 1
    return model


# What is done to a block whose dropout is in the kernel of its sum, and the values that it gives then.
CHANGES = {
    "training": (lambda block: None, {0.0, 2.0, 4.0}),
    "evaluation": (lambda block: block.eval(), {2.0}),
    "p": (lambda block: setattr(block.mlp.dropout, "p", 0.75), {0.0, 2.0, 4.0, 6.0}),
    "samples of a model in evaluation": (lambda block: block.eval().mlp.dropout.train(), {1.0, 3.0}),
    "Identity in its place": (lambda block: setattr(block.mlp, "dropout", nn.Identity()), {1.0, 3.0}),
    "a wrapper around its sublayer": (lambda block: setattr(block, "mlp", nn.Sequential(block.mlp)), {0.0, 2.0, 4.0}),
    "a hook on it": (lambda block: block.mlp.dropout.register_forward_hook(lambda *call: call[-1] * 2), {0.0, 2.0, 4.0, 6.0}),
}


def test_a_dropout_that_ends_a_sublayer_is_in_the_kernel_of_the_sum_as_it_is_now(device):
    model = ones_of_sublayers(Model(p=0.5, depth=1)).to(device)
    (trial,) = fuse_prenorm_block(model.blocks)
    assert trial.norms["ln_2"] == ("dropout",) and ("dropout",) in trial.sums
    for name, (change, expected) in CHANGES.items():
        (block,) = copy.deepcopy(model.blocks)
        change(block)
        assert set(block(torch.zeros(64, N, device=device)).unique().tolist()) == expected, name


def in_place(self, x):
    y = self.ln_1(x)
    h = self.mlp(y)
    h += self.attn(y)
    return x + h


@pytest.mark.parametrize("forward", [in_place, lambda self, x: self.attn(y := self.ln_1(x)) + self.mlp(y) + x])
def test_two_branches_that_are_added_up_first_are_one_kernel_with_the_stream(forward, device, monkeypatch):
    block, x, sums = block_of(forward).to(device), torch.randn(3, N, device=device), []
    wanted = block(x)
    trial = fuse_prenorm_block(block)
    assert trial.sums == [("second branch",)] and {role.path for role in trial.roles} == {"attn", "mlp"}
    monkeypatch.setattr(lazy, "WATCH", lambda what, *_: sums.append(what) if isinstance(what, lazy.Lazy) else None)
    torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)
    assert len(sums) == 1 and sums[0].x1 is not None


def test_norms_without_weights_have_the_width_of_most_matrices(device):
    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(N, 4 * N), nn.Linear(N, 4 * N), nn.Linear(4 * N, N)

        def forward(self, x):
            return self.down(self.gate(x).sigmoid() * self.up(x))

    ln_1, ln_2 = (nn.LayerNorm(N, elementwise_affine=False) for _ in range(2))
    block = block_of(nothing, ln_1=ln_1, ln_2=ln_2, mlp=MLP()).to(device)
    assert fuse_prenorm_block(block).width == N


def test_the_stream_stays_in_fp32_where_asked(device):
    x = torch.randn(3, N, device=device, dtype=torch.bfloat16)
    model = fused(Model().to(device, torch.bfloat16), residual_in_fp32=True)
    assert model.blocks[1](model.blocks[0](x)).dtype == torch.float32


class InFp32(nn.Module):
    """A norm that ends in fp32 whatever it gets."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()


class Adding(nn.Module):
    """Attention or an MLP that gets its residual, as Bloom's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, x, residual):
        return residual + self.linear(x)


def on_normed(self, x):
    y = self.ln_1(x)
    x = self.attn(y, y)
    y = self.ln_2(x)
    return self.mlp(y, y)


@pytest.mark.parametrize("of_graph", [True, False])
def test_under_autocast_what_is_meant_to_be_fp32_stays_so(of_graph, device):
    routed, stream = (
        fused(Model(norm=InFp32)).to(device),
        nn.Sequential(*(block_of(on_normed, attn=Adding(), mlp=Adding()) for _ in "ab")),
    )
    seen = []
    routed.blocks[0].mlp.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    replace_norms(stream.to(device), verbose=False)
    fuse_prenorm_block(stream)
    with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(of_graph):
        routed(torch.randn(3, N, device=device))
        assert seen == [torch.float32] and stream(torch.randn(3, N, device=device)).dtype == torch.float32


def test_a_part_that_blocks_share_gives_a_tensor(device):
    """Each block would do with its output what the other does."""
    shared = nn.Linear(N, N)
    first = block_of(lambda self, x: self.ln_2(x + self.attn(x)), attn=shared)
    second = block_of(lambda self, x: second_half(self, x + self.attn(x)), attn=shared)
    model, x = nn.ModuleList((first, second)).to(device), torch.randn(3, N, device=device)
    wanted = copy.deepcopy(model)
    replace_norms(model, verbose=False)
    for block in model:
        fuse_prenorm_block(block)
    for block, own in zip(model, wanted, strict=True):
        torch.testing.assert_close(block(x), own(x), rtol=1e-4, atol=1e-5)
        with torch.autocast(device.type, torch.bfloat16):
            assert block(x).dtype == own(x).dtype == torch.float32


@pytest.mark.parametrize("norm", [nn.LayerNorm, Llama])
def test_under_autocast_norms_give_the_dtype_that_linear_layers_take(norm, device):
    """Llama's has weights in fp32, which alone would make it fp32."""
    model, seen = fused(Model(norm=norm)).to(device), []
    for block in model.blocks:
        for part in (block.attn, block.mlp):
            part.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    for of_graph in (True, False):
        with torch.autocast(device.type, torch.bfloat16), torch.set_grad_enabled(of_graph):
            model(torch.randn(3, N, device=device))
    assert seen == [torch.bfloat16] * 8


def test_activation_checkpointing_around_a_fused_block(device):
    model, x = fused(Model(p=0.5, depth=1)).to(device), torch.randn(3, N, device=device)
    torch.manual_seed(1)
    expected = gradients(model, x)
    for reentrant in (False, True):
        wrapped = copy.deepcopy(model)
        wrapped.blocks = nn.ModuleList(Checkpointed(block, reentrant) for block in wrapped.blocks)
        torch.manual_seed(1)
        y = wrapped(x.clone().requires_grad_())
        y.sin().sum().backward()
        torch.testing.assert_close([y, *(p.grad for p in wrapped.parameters())], [expected[0], *expected[2:]])


class Checkpointed(nn.Module):
    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *args):
        return checkpoint(self.block, *args, use_reentrant=self.reentrant)


REFUSED = {
    "none of its replaced norms follows a sum, or is followed by one": lambda: block_of(no_sum),
    "trying it with stand-ins for its sublayers raised AttributeError": lambda: block_of(lambda self, x: x.undefined),
    "its forward is replaced on the instance": lambda: with_forward(Block()),
    "it has no replaced norm. It is block 2 of 3, and all stay as they were": lambda: stack_of(
        Block(), Block(), nn.Linear(N, N)
    ),
    "it is fused already; restore_norms undoes it": lambda: fused(Model()).blocks,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_can_not_be_fused_is_refused_and_stays_as_it_was(why):
    block = REFUSED[why]()
    before, state = described(block), torch.get_rng_state()
    with pytest.raises(ValueError, match=re.escape(why)):
        fuse_prenorm_block(block)
    assert described(block) == before and torch.equal(torch.get_rng_state(), state)


def test_blocks_are_restored_with_their_norms_and_nothing_is_if_another_class_is_over_one():
    model = fused(Model())
    adopted, block = classes(model), model.blocks[0]
    cls = type(block)
    block.__class__ = type("Sharded", (cls,), {})
    with pytest.raises(ValueError, match=r"since blocks\.0, a Block, was replaced, another tool changed its class, to Sharded"):
        restore_norms(model)
    block.__class__ = cls
    assert classes(model) == adopted and "blocks.0: Block as it was" in restore_norms(model, verbose=False)
    assert classes(model) == classes(Model()) and vars(block).keys() == vars(Block()).keys()


def described(block):
    return [(type(part), len(part._forward_hooks), len(part._forward_pre_hooks)) for part in block.modules()]


def stack_of(*blocks):
    replace_norms(blocks[0].ln_1, verbose=False)  # stays replaced
    return nn.ModuleList(blocks)


def no_sum(self, x):
    return self.mlp(self.ln_2(self.attn(self.ln_1(x))))


def with_forward(block):
    block.forward = lambda *args, own=block.forward: own(*args)
    return block


def test_trying_a_block_touches_and_compiles_nothing_and_follows_no_default_dtype_or_device():
    compiled = []

    def seen(self, x):
        self.calls.append(1)
        self.counter += 1
        return nothing(self, x)

    forward = torch.compile(seen, backend=lambda graph, _: compiled.append(graph) or graph.forward)
    block = block_of(forward, calls=[])
    block.register_buffer("counter", torch.zeros(()))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            fuse_prenorm_block(block)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not compiled and block.calls == [] and block.counter == 0
