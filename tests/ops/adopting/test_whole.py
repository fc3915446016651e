"""adopt: a whole model in one call."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import adopt, restore_norms
from ops.adopting import trial, whole
from ops.adopting.lazy import Lazy
from ops.adopting.results import difference

from .lookalikes import Gemma, Llama
from .toys import Block, Model, N, Sublayer, block_of, classes


class Base(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.n1, self.n2, self.n3, self.n4 = (norm(N) for _ in range(4))
        self.attn, self.mlp = Sublayer(0.1), Sublayer(0.1)
        self.gamma, self.drop, self.p = nn.Parameter(torch.ones(N)), nn.Dropout(0.1), 0.1


def drop_path(x, training):
    return x if not training else x.div(0.5) * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5)


def mlp_in_the_block(self, x):
    x = x + F.dropout(self.attn(self.n1(x)), self.p, self.training)
    rows = x.reshape(-1, N)
    return (rows + self.mlp.linear(torch.relu(self.attn.linear(self.n2(rows))))).view(x.shape)


def skipped(self, x):
    if self.training and torch.rand(()) < 0.5:
        return x
    return x + self.mlp(self.n1(x))


FORMS = {  # forward, then what is fused in each block
    "prenorm": (lambda self, x: nothing_of(self, self.attn, x, self.n1), {"n1": (), "n2": ("dropout",)}),
    "postnorm": (
        lambda self, x: self.n2((y := self.n1(x + self.attn(x))) + self.mlp(y)),
        {"n1": ("dropout",), "n2": ("dropout",)},
    ),
    "norm on the branch": (lambda self, x: (y := x + self.n1(self.attn(x))) + self.n2(self.mlp(y)), {}),
    "sandwich": (
        lambda self, x: (y := x + self.n2(self.attn(self.n1(x)))) + self.n4(self.mlp(self.n3(y))),
        {"n1": (), "n3": ("norm of the branch",)},
    ),
    "parallel, one norm": (lambda self, x: x + self.attn(y := self.n1(x)) + self.mlp(y), {"n1": ()}),
    "parallel, two norms": (lambda self, x: self.attn(self.n1(x)) + self.mlp(self.n2(x)) + x, {"n1": ()}),
    "layer scale": (lambda self, x: x + self.gamma * self.attn(self.n1(x)), {"n1": ()}),
    "a constant": (lambda self, x: x + 0.3 * self.drop(self.attn(self.n1(x))), {"n1": ()}),
    "DeepNorm": (lambda self, x: self.n1(x * 1.5 + self.attn(x)), {"n1": ("dropout",)}),
    "drop path": (lambda self, x: x + drop_path(self.attn(self.n1(x)), self.training), {"n1": ()}),
    "MLP in the block": (mlp_in_the_block, {"n1": (), "n2": ("dropout",)}),
    "clamped": (lambda self, x: (x + self.attn(self.n1(x))).clamp(-3, 3) + self.mlp(self.n2(x)), {"n1": ()}),
    "skipped layers": (skipped, {"n1": ()}),
}


def nothing_of(self, attn, x, norm):
    x = x + attn(norm(x))
    return x + self.mlp(self.n2(x))


class Net(nn.Module):
    def __init__(self, forward, norm, stack=nn.ModuleList, depth=2):
        super().__init__()
        block = type("OtherBlock", (Base,), {"forward": forward})
        blocks = [block(norm) for _ in range(depth)]
        given = {str(i): one for i, one in enumerate(blocks)} if stack is nn.ModuleDict else blocks
        self.layers = stack(*given) if stack is nn.Sequential else stack(given)
        self.final = norm(N)

    def forward(self, x):
        for block in self.layers.children():
            x = block(x)
        return self.final(x), x[:, 0]  # what is handed on is used twice


def results(model, x):
    model.zero_grad()
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    outputs = model(x)
    sum(y.sin().sum() for y in outputs).backward()
    return [*outputs, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(("form", "norm"), [*((form, nn.LayerNorm) for form in FORMS), ("sandwich", Gemma)])
def test_a_block_of_any_form_is_found_fused_and_computes_what_it_did(form, norm, device):
    forward, expected = FORMS[form]
    torch.manual_seed(0)
    model = Net(forward, norm).to(device).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    adopted, x = copy.deepcopy(model), torch.randn(3, 4, N, device=device)
    found = adopt(adopted, verbose=False)
    assert not found.left and [*found.blocks] == ["layers.0", "layers.1"]
    for fused in found.blocks.values():
        assert {path: set(features) for path, features in fused.norms.items()} == {p: set(f) for p, f in expected.items()}
    outputs = results(adopted, x)
    torch.testing.assert_close(outputs, results(model, x), rtol=1e-4, atol=1e-4)
    assert not any(isinstance(y, Lazy) for y in outputs)
    if form == "skipped layers":
        for module in (*model.modules(), *adopted.modules()):
            module.p = 0.0
        torch.manual_seed(0)
        wanted = model.train()(x)
        torch.manual_seed(0)
        torch.testing.assert_close(adopted.train()(x), wanted, rtol=1e-4, atol=1e-4)
    assert all(y.isfinite().all() for y in adopted.train()(x))
    found.undo()
    assert classes(adopted) == classes(model) and not any(m._forward_hooks or m._forward_pre_hooks for m in adopted.modules())


class NormsItsQueries(Sublayer):
    def __init__(self):
        super().__init__()
        self.q_norm = nn.LayerNorm(N)

    def forward(self, x, angles):
        cos, sin, _ = angles
        return super().forward(self.q_norm(x) * cos + sin)


def test_a_block_whose_attention_norms_its_queries_and_needs_what_the_model_gives_it_is_found(device):
    forward = lambda self, x, angles: (y := x + self.attn(self.ln_1(x), angles)) + self.mlp(self.ln_2(y))  # noqa: E731
    block = block_of(forward, attn=NormsItsQueries()).to(device)
    adopted, x = copy.deepcopy(block), torch.randn(2, 3, N, device=device)
    (found,) = adopt(adopted, verbose=False).blocks.values()
    assert found.norms == {"ln_1": (), "ln_2": ()}
    torch.testing.assert_close(adopted(x, (0.5, 0.1, 0)), block(x, (0.5, 0.1, 0)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stack", [nn.ModuleDict, type("Stack", (nn.ModuleList,), {}), nn.Sequential])
def test_blocks_are_found_in_every_container(stack, device):
    model = Net(FORMS["prenorm"][0], nn.LayerNorm, stack).to(device)
    assert len(adopt(model, verbose=False).blocks) == 2


def test_the_table_groups_what_is_alike_and_says_what_was_left_and_why():
    model = nn.ModuleDict({"net": Model(depth=4), "odd": nn.ModuleList([block_of(lambda self, x: self.mlp(self.ln_1(x)))])})
    assert str(adopt(model, verbose=False)).splitlines() == [
        "net.blocks.{0…3}.ln_1: 4 × LayerNorm(16), with the stream past it",
        "net.blocks.{0…3}.ln_2: 4 × LayerNorm(16), with the add before it",
        "net.final: LayerNorm(16), fused",
        "odd.0.ln_1: LayerNorm(16), fused",
        "odd.0.ln_2: LayerNorm(16), fused",
        "odd.0: OtherBlock, sums left alone: none of its replaced norms follows a sum, or is followed by one",
    ]


def test_only_and_blocks_choose_and_a_second_call_changes_nothing():
    model = Model(depth=2)
    found = adopt(model, only=lambda name, module: "blocks.0" in name, verbose=False)
    assert [*found.blocks] == ["blocks.0"] and sum(site.fused for site in found.norms) == 2
    restore_norms(model, verbose=False)
    assert not adopt(model, blocks=False, verbose=False).blocks
    found = adopt(model, verbose=False)
    assert len(found.blocks) == 2 and "ln_1: 2 × LayerNorm(16), with the stream past it" in str(found)
    hooks = [[*module._forward_hooks] for module in model.modules()]
    assert not adopt(model, verbose=False).blocks
    assert [[*module._forward_hooks] for module in model.modules()] == hooks


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class NanochatBlock(nn.Module):
    """Norms are calls, as in nanochat; and one is a module that has the name of a function of F."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.layer_norm = nn.Linear(N, N), nn.Linear(N, N), nn.LayerNorm(N)

    def attend(self, x):
        return F.silu(norm(self.attn(x)))

    def forward(self, x):
        x = x + self.mlp(self.layer_norm(x))
        return x + self.attend(norm(x))


class Nanochat(nn.Sequential):
    def forward(self, x):
        return F.layer_norm(norm(super().forward(x)), (N,))


def test_norms_that_are_calls_and_no_modules_are_named_and_what_is_a_module_is_fused(capsys):
    model = nn.Sequential(Nanochat(nn.Sequential(NanochatBlock(), NanochatBlock())))
    x = torch.randn(2, 3, N)
    expected = model(x)
    assert len(adopt(model).blocks) == 2
    rest = "which is no module: call {}_fn in its place, or use a norm module"
    assert capsys.readouterr().out.splitlines() == [
        "0.0.{0,1}.layer_norm: 2 × LayerNorm(16), with the stream past it",
        f"Nanochat.forward calls F.layer_norm, {rest.format('layer_norm')}",
        f"Nanochat.forward calls F.rms_norm by norm(), {rest.format('rms_norm')}",
        f"NanochatBlock.forward calls F.rms_norm by norm(), {rest.format('rms_norm')}",
    ]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_lazy_modules_are_no_obstacle():
    model = nn.Sequential(nn.LazyLinear(N), Model(norm=Llama), nn.LazyBatchNorm1d())
    found = adopt(model, verbose=False)
    assert len(found.blocks) == 2 and all(site.fused for site in found.norms)


class Attributes(nn.Module):
    """Blocks that are attributes, and a model that asks for the class of a norm."""

    def __init__(self, block=Block, asks=False):
        super().__init__()
        self.layer1, self.layer2, self.final, self.asks = block(), block(), nn.LayerNorm(N), asks

    def forward(self, x):
        y = self.final(self.layer2(self.layer1(x)))
        return 2 * y if self.asks and type(self.final) is not nn.LayerNorm else y


def test_blocks_that_are_attributes_are_found_and_so_is_a_model_that_is_a_block(device):
    assert [*adopt(Attributes().to(device), verbose=False).blocks] == ["layer2", "layer1"]
    assert [*adopt(Block(), verbose=False).blocks] == [""]


def test_a_batch_shows_whether_the_model_computes_what_it_did_and_otherwise_all_is_undone(device, capsys):
    x = torch.randn(2, 3, N, device=device)
    for batch in (x, (x,), {"x": x}):
        assert adopt(Block().to(device), batch, verbose=False).blocks
    model = Attributes(asks=True).to(device).train()
    before, random = classes(model), torch.get_rng_state()
    found = adopt(model, x)
    assert classes(model) == before and model.training and not found.blocks and torch.equal(torch.get_rng_state(), random)
    assert re.fullmatch(r"all undone: output is off by 1 of its size\n", capsys.readouterr().out)
    assert all(p.grad is None for p in model.parameters())


class Unseen(nn.Module):
    """Its softmax does not see its bias, whose gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.inner, self.bias = nn.LayerNorm(N), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = self.inner(x)
        return 1e3 * (y + torch.softmax(y + self.bias, -1))


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(device):
    torch.manual_seed(0)
    (note,) = adopt(Unseen().to(device), torch.randn(64, N, device=device), verbose=False).notes
    assert note.startswith("no block found")
    weight, bias = "the gradient of weight", "the gradient of bias"
    wanted = {weight: torch.ones(4), bias: torch.full((4,), 1e-7)}
    for dtype in (torch.float32, torch.bfloat16):
        assert not difference(wanted, wanted | {bias: -wanted[bias]}, dtype, least=1e-3)
        assert difference(wanted, wanted | {bias: -wanted[bias]}, dtype) == "the gradient of bias is off by 2 of its size"
        small = wanted | {bias: 1e-3 * wanted[weight]}  # is there, and lost
        assert difference(small, wanted, dtype, least=1e-3) == "the gradient of bias is off by 1 of its size"


def test_undoing_takes_hooks_away_that_a_forward_registered_since_of_whatever_kind():
    model, calls = Attributes(asks=True), []

    def register(module, args):
        calls.append(args)
        if len(calls) == 2:
            model.final.register_forward_hook(lambda *call: None, with_kwargs=True, always_call=True)
            model.final.register_forward_pre_hook(lambda *call: None, with_kwargs=True)

    model.register_forward_pre_hook(register)
    assert not adopt(model, torch.randn(2, 3, N), verbose=False).blocks and len(calls) == 2
    assert not any(hooks for name, hooks in vars(model.final).items() if name.startswith("_forward_"))


def test_a_model_is_adopted_as_a_whole_or_stays_as_it_was(monkeypatch):
    model = Model(depth=3)
    before, trials = classes(model), []

    def fails_at_last(*args):
        trials.append(args)
        if len(trials) == 3:
            raise KeyboardInterrupt
        return trial.try_block(*args)

    monkeypatch.setattr(whole, "try_block", fails_at_last)
    with pytest.raises(KeyboardInterrupt):
        adopt(model)
    assert classes(model) == before and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class NoTruth:
    """As arrays and data frames: it has no truth value, and comparing it gives no bool."""

    def __bool__(self):
        raise ValueError("The truth value is ambiguous")

    __eq__ = __bool__
    __hash__ = object.__hash__


TABLE = NoTruth()
CONSTANT = torch.arange(3)


def test_what_a_model_s_file_holds_beside_it_is_no_obstacle():
    def forward(self, x):
        assert TABLE is not None and CONSTANT is not None
        return FORMS["prenorm"][0](self, x)

    model = Net(forward, nn.LayerNorm)
    model.table = NoTruth()
    assert len(adopt(model, verbose=False).blocks) == 2


def test_what_can_not_be_adopted_is_said():
    with pytest.raises(TypeError, match="model is a list, expected a module; put blocks into"):
        adopt([Block()])
    with pytest.raises(TypeError, match="only is 'n1', expected a function of name and module"):
        adopt(Block(), only="n1")
    assert "no block found" in str(adopt(nn.Sequential(nn.LayerNorm(N)), verbose=False))
    conditioned = nn.ModuleList([block_of(lambda self, x, c: x + self.attn(self.ln_1(x) * c["scale"]))])
    assert "it needs c beside its stream, as a conditioned block does" in str(adopt(conditioned, verbose=False))


def test_an_adopted_model_on_meta_has_shapes():
    model = Model(p=0.1)
    adopt(model, verbose=False)
    y = model.to("meta")(torch.randn(2, 3, N, device="meta", requires_grad=True))
    y.sum().backward()
    assert y.shape == (2, 3, N) and model.final.weight.grad.is_meta
