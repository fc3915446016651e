"""Blocks that are conditioned as DiT, PixArt, SD3, Flux, Wan and Lumina are: norms with scale and shift, sums with gates."""

import copy
from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ops import adopt
from ops.adopting import norms
from ops.adopting.lazy import Lazy
from ops.modulated import MOST_COLUMNS

from .toys import N, nodes_behind

B, T = 2, 6


class Attention(nn.Module):
    """Of one stream, or of two, which it mixes."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(N, N)

    def forward(self, x, other=None):
        if other is None:
            return torch.tanh(self.proj(x))
        mean = x.mean(1, keepdim=True) - other.mean(1, keepdim=True)
        return torch.tanh(self.proj(x) + mean), torch.sin(self.proj(other) - mean)


def norm(affine=False):
    return nn.LayerNorm(N, eps=1e-6, elementwise_affine=affine)


def mlp():
    return nn.Sequential(nn.Linear(N, 2 * N), nn.GELU(), nn.Linear(2 * N, N))


def modulate(y, shift, scale):
    return y * (1 + scale[:, None]) + shift[:, None]


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = norm(), Attention(), norm(), mlp()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(N, 6 * N))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class ByAddcmul(DiT):
    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        x = torch.addcmul(x, gate1, self.attn(torch.addcmul(shift1, self.norm1(x), 1 + scale1)))
        return x + self.mlp(self.norm2(x).mul(1 + scale2).add(shift2)).mul(gate2)


class PixArt(nn.Module):
    """A table that is added to a condition for all blocks; attention to text without a norm before."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.cross, self.norm2, self.mlp = norm(), Attention(), Attention(), norm(), mlp()
        self.table = nn.Parameter(torch.randn(6, N))

    def forward(self, x, text=None, timestep=None):
        of_block = (self.table[None] + timestep.reshape(len(x), 6, -1)).chunk(6, dim=1)
        shift1, scale1, gate1, shift2, scale2, gate2 = of_block
        x = gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1) + x
        x = self.cross(x + text.mean(1, keepdim=True) if text is not None else x) + x
        return gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2) + x


class AdaNorm(nn.Module):
    def __init__(self, chunks):
        super().__init__()
        self.norm, self.linear, self.chunks = norm(), nn.Linear(N, chunks * N), chunks

    def forward(self, x, c):
        shift, scale, *others = self.linear(F.silu(c)).chunk(self.chunks, dim=1)
        return modulate(self.norm(x), shift, scale), *others


class SD3(nn.Module):
    """Two streams that meet in attention alone, and norms that are modules with their modulation."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm1_text, self.attn = AdaNorm(6), AdaNorm(6), Attention()
        self.norm2, self.mlp, self.norm2_text, self.mlp_text = norm(), mlp(), norm(), mlp()

    def forward(self, x, text, c):
        y, gate1, shift2, scale2, gate2 = self.norm1(x, c)
        y_text, gate1_text, shift2_text, scale2_text, gate2_text = self.norm1_text(text, c)
        h, h_text = self.attn(y, y_text)
        x = x + gate1.unsqueeze(1) * h
        x = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        text = text + gate1_text.unsqueeze(1) * h_text
        y_text = modulate(self.norm2_text(text), shift2_text, scale2_text)
        return x, text + gate2_text.unsqueeze(1) * self.mlp_text(y_text)


class FluxSingle(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.up, self.out = AdaNorm(3), Attention(), nn.Linear(N, 2 * N), nn.Linear(3 * N, N)

    def forward(self, x, text, c):
        both = torch.cat([text, x], dim=1)
        y, gate = self.norm(both, c)
        h = torch.cat([self.attn(y), F.gelu(self.up(y))], dim=2)
        both = both + gate.unsqueeze(1) * self.out(h)
        return both[:, text.shape[1] :], both[:, : text.shape[1]]


class Wan(nn.Module):
    """Modulation in fp32; the norm between the two has weights and no modulation."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.cross, self.norm3, self.mlp = (
            norm(), Attention(), norm(True), Attention(), norm(), mlp(),
        )  # fmt: skip
        self.table = nn.Parameter(torch.randn(1, 6, N))

    def forward(self, x, text, temb):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.table + temb.float()).chunk(6, dim=1)
        y = (self.norm1(x.float()) * (1 + scale1) + shift1).type_as(x)
        x = (x.float() + self.attn(y) * gate1).type_as(x)
        x = x + self.cross(self.norm2(x.float()).type_as(x))
        y = (self.norm3(x.float()) * (1 + scale2) + shift2).type_as(x)
        return (x.float() + self.mlp(y).float() * gate2).type_as(x)


class Lumina(nn.Module):
    """A scale without a shift, and a norm of the branch under the gate."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.RMSNorm(N, eps=1e-5), Attention(), nn.RMSNorm(N, eps=1e-5)
        self.linear = nn.Linear(N, 2 * N)

    def forward(self, x, c):
        scale, gate = self.linear(c).chunk(2, dim=1)
        y = self.attn(self.norm1(x) * (1 + scale[:, None]))
        return x + gate.unsqueeze(1).tanh() * self.norm2(y)


CONDITION, TEXT, TABLE = (B, N), (B, 4, N), (B, 6, N)
# shapes beside x, modulated norms, norms whose kernel adds, sums that compute no norm
BLOCKS = {
    DiT: ([CONDITION], {"norm1", "norm2"}, set(), [("gate",)]),
    ByAddcmul: ([CONDITION], {"norm1", "norm2"}, set(), [("gate",)]),
    PixArt: ([TEXT, TABLE], {"norm1", "norm2"}, set(), [("gate",)]),
    SD3: ([TEXT, CONDITION], {"norm1.norm", "norm1_text.norm", "norm2", "norm2_text"}, set(), [("gate",)]),
    FluxSingle: ([TEXT, CONDITION], {"norm.norm"}, set(), [("gate",)]),
    Wan: ([TEXT, TABLE], {"norm1", "norm3"}, {"norm2"}, [("gate",)]),
    Lumina: ([CONDITION], {"norm1"}, set(), [("norm of the branch", "gate")]),
}


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x, *others):
        y = x
        for block in self.blocks:
            y = block(y, *others)
            y, others = (y[0], (y[1], *others[1:])) if isinstance(y, tuple) else (y, others)
        return y


@cache
def adopted_once(kind, device):
    torch.manual_seed(0)
    model = Stack(kind).to(device)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    adopted = copy.deepcopy(model)
    found = adopt(adopted, verbose=False)
    assert len(found.blocks) == 2 and not found.left
    inputs = [torch.randn(shape).to(device) for shape in ((B, T, N), *BLOCKS[kind][0])]
    return model, adopted, found, inputs


def models_of(kind, device):
    model, adopted, found, inputs = adopted_once(kind, device)
    model, adopted, inputs = copy.deepcopy((model, adopted, inputs))
    return model, adopted, found, inputs


def results(model, inputs, call=None):
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = (model if call is None else call)(*leaves)
    return [y, *torch.autograd.grad(y.float().sin().sum(), [*leaves, *model.parameters()], allow_unused=True)]


def check(found, wanted, error=2e-5):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and (a - b).norm() <= error * b.norm().clamp_min(1e-3)


def check_rounded(found, plain, exact):
    """Results in bf16: as near to exact ones as those of the plain model are."""
    for a, b, e in zip(found, plain, exact, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and (a - e).norm() <= 2 * (b - e).norm() + 0.01 * e.norm()


@pytest.mark.parametrize("kind", BLOCKS)
def test_conditioned_blocks_compute_what_they_computed_in_few_kernels(kind, device, kernel):
    model, adopted, found, inputs = models_of(kind, device)
    for trial in found.blocks.values():
        assert ({*trial.modulated}, {*trial.norms}, trial.sums) == BLOCKS[kind][1:]
    assert "with scale and shift" in str(found)
    check(results(adopted, inputs), results(model, inputs))
    with torch.no_grad():
        check([adopted.eval()(*inputs)], [model.eval()(*inputs)])


@pytest.mark.parametrize("kind", BLOCKS)
def test_under_autocast_and_checkpointing(kind, device):
    model, adopted, _, inputs = models_of(kind, device)
    wanted = results(model, inputs)
    with torch.autocast(device.type, torch.bfloat16):
        check_rounded(results(adopted, inputs), results(model, inputs), wanted)
    for reentrant in (False, True):
        leaves = [t.clone().requires_grad_() for t in inputs]
        checkpoint(adopted, *leaves, use_reentrant=reentrant).sin().sum().backward()
        check([t.grad for t in leaves], wanted[1 : 1 + len(leaves)])


def test_a_norm_behind_a_sum_that_the_block_rounds_first_is_not_computed_with_the_sum(device):
    (trial,) = adopt(nn.ModuleList([Wan()]).to(device, torch.bfloat16), verbose=False).blocks.values()
    assert not trial.norms and trial.modulated == ("norm1", "norm3")


@pytest.mark.parametrize("kind", [SD3, Wan])
def test_compiled_without_a_graph_break(kind, device, kernel):
    torch._dynamo.reset()
    model, adopted, _, inputs = models_of(kind, device)
    check(results(adopted, inputs, torch.compile(adopted, fullgraph=True, backend="aot_eager")), results(model, inputs))


def test_a_modulated_norm_and_the_stream_past_it_are_one_node_and_so_is_a_gated_sum(device, kernel):
    _, adopted, _, inputs = models_of(DiT, device)
    y = adopted(inputs[0].requires_grad_() * 1, *inputs[1:])  # which keeps the nodes alive
    nodes = nodes_behind(y)
    assert [node.name() for node in nodes].count("FusedModulatedNormBackward") == 8
    edges = Counter(edge for node in nodes for edge in node.next_functions)
    assert all(count == 1 for (node, _), count in edges.items() if node is not None and "Fused" in node.name())


def test_a_shift_is_added_in_the_kernel_of_its_norm(monkeypatch):
    _, adopted, _, inputs = models_of(DiT, "cpu")
    shifts = []
    own = norms.modulated_norm_fn
    monkeypatch.setattr(norms, "modulated_norm_fn", lambda x, *of, **what: shifts.append(of[1]) or own(x, *of, **what))
    adopted(*inputs)
    assert [shift.shape for shift in shifts] == [(B, 1, N)] * 4


def hooked(of):
    """What a hook of these modules gets and gives, with its gradients."""

    def program(model, inputs):
        kept = []

        def keep(module, args, output):
            for t in (args[0], *(output if isinstance(output, tuple) else (output,))):
                assert type(t) is torch.Tensor
                t.retain_grad()
                kept.append(t)

        for block in model.blocks:
            of(block).register_forward_hook(keep)
        y = model(*inputs)
        y.sin().sum().backward(retain_graph=True)
        return [y, *kept, *(t.grad for t in kept)]

    return program


def changed_norm(model, inputs):
    for block in model.blocks:
        block.norm2.register_forward_hook(lambda module, args, output: output * 1.5)
    return [model(*inputs)]


def edited_stream(model, inputs):
    """The stream is edited in place after its norm has seen it."""
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda module, args: streams[-1].mul_(0.5).numel() and None)
        block.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    streams = []
    with torch.no_grad():
        return [model(inputs[0].clone(), *inputs[1:])]


def another_norm(model, inputs):
    for block in model.blocks:
        block.norm2 = nn.LayerNorm(N, eps=0.1).to(inputs[0].device)
    return [model(*inputs)]


PROGRAMS = {
    "norm": hooked(lambda block: block.norm1),
    "modulation": hooked(lambda block: block.modulation),
    "norm changed": changed_norm,
    "stream edited": edited_stream,
    "another norm": another_norm,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_who_looks_inside_finds_tensors_and_what_was_there(name, device):
    model, adopted, _, inputs = models_of(DiT, device)
    found = []
    for one in (model, adopted):
        leaves = [t.clone().requires_grad_() for t in inputs]
        outputs = PROGRAMS[name](one, [t * 1 for t in leaves])
        live = [y for y in outputs if y.requires_grad]
        if live:
            total = sum(y.sin().sum() for y in live)
            outputs += torch.autograd.grad(total, [*leaves, *one.parameters()], allow_unused=True)
        found.append(outputs)
    check(found[1], found[0])


class TwoSums(Lumina):
    """Behind the sum with the normed branch stands a norm of the same eps."""

    def __init__(self):
        super().__init__()
        self.norm3, self.mlp = nn.RMSNorm(N, eps=1e-5), mlp()

    def forward(self, x, c):
        x = super().forward(x, c)
        return x + self.mlp(self.norm3(x))


def test_a_normed_branch_under_a_gate_and_the_norm_behind_its_sum(device):
    model = Stack(TwoSums).to(device)
    adopted, inputs = copy.deepcopy(model), [torch.randn(B, T, N, device=device), torch.randn(B, N, device=device)]
    assert {path for trial in adopt(adopted, verbose=False).blocks.values() for path in trial.modulated} == {"norm1"}
    for eps in (1e-5, 1e-2):
        for block in (*model.blocks, *adopted.blocks):
            block.norm3.eps = eps
        check(results(adopted, inputs), results(model, inputs))


class SmallFactor(DiT):
    """The factor is no 1 + scale, and small."""

    def forward(self, x, c):
        shift, factor, *_ = (t[:, None] for t in (1e-6 * self.modulation(c)).chunk(6, dim=-1))
        return x + self.mlp((self.norm1(x) * factor + shift) * 1e6)


def test_a_factor_far_from_one_keeps_its_digits(device):
    torch.manual_seed(0)
    model = Stack(SmallFactor).to(device)
    adopted, inputs = copy.deepcopy(model), [torch.randn(B, T, N, device=device), torch.randn(B, N, device=device)]
    assert all(trial.modulated for trial in adopt(adopted, verbose=False).blocks.values())
    check(results(adopted, inputs), results(model, inputs))


@pytest.mark.parametrize("kind", [DiT, Lumina])
def test_one_token_a_sample(kind, device):
    model, adopted, _, inputs = models_of(kind, device)
    inputs[0] = inputs[0][:, :1]
    check(results(adopted, inputs), wanted := results(model, inputs))
    with torch.autocast(device.type, torch.bfloat16):
        check_rounded(results(adopted, inputs), results(model, inputs), wanted)


class PartsAgain(DiT):
    again = None  # whether the parts of the block are checkpointed, reentrant or not

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.part(lambda x: self.attn(modulate(self.norm1(x), shift1, scale1)), x)
        return self.part(lambda x: x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2)), x)

    def part(self, function, x):
        return function(x) if self.again is None else checkpoint(function, x, use_reentrant=self.again)


class PlainPartsAgain(PartsAgain):
    def forward(self, x, c):
        x = x + self.part(lambda x: self.attn(self.norm1(x)), x) + c[:, None]
        return self.part(lambda x: x + self.mlp(self.norm2(x)), x)


# Reentrant, a part has to get all tensors that want gradients as arguments.
@pytest.mark.parametrize(("kind", "again"), [(PartsAgain, False), (PlainPartsAgain, False), (PlainPartsAgain, True)])
def test_parts_of_a_block_that_are_computed_again(kind, again, device):
    torch.manual_seed(0)
    model = Stack(kind).to(device)
    adopted, inputs = copy.deepcopy(model), [torch.randn(B, T, N, device=device), torch.randn(B, N, device=device)]
    assert len(adopt(adopted, verbose=False).blocks) == 2
    check(results(adopted, inputs), results(model, inputs))

    def gradients(model):
        leaves = [t.clone().requires_grad_() for t in inputs]
        model(*leaves).sin().sum().backward()
        return [t.grad for t in (*leaves, *model.parameters())]

    wanted = gradients(model)
    for block in adopted.blocks:
        block.again = again
    check(gradients(adopted), wanted)


class PerToken(DiT):
    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def test_a_condition_of_each_token_is_not_fused_and_stays_right(device):
    model = Stack(PerToken).to(device)
    adopted, inputs = copy.deepcopy(model), [torch.randn(B, T, N, device=device), torch.randn(B, T, N, device=device)]
    assert not any(trial.modulated for trial in adopt(adopted, verbose=False).blocks.values())
    check(results(adopted, inputs), results(model, inputs))


def test_a_gate_that_the_kernels_do_not_take_is_multiplied_at_once():
    x = torch.randn(2, 3, MOST_COLUMNS + 1)
    for y, gate in ((x, x[:, :1]), (x[..., :8], x[:, :1, :8].double()), (x[..., :8], x[..., 8:16])):
        assert torch.equal(gate * Lazy(y), gate * y)
    assert isinstance(x[:, :1, :8] * Lazy(x[..., :8]), Lazy)
