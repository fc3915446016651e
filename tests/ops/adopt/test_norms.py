"""replace_norms and restore_norms: nothing but the forward of a norm changes. Whose norms are taken: `test_recognise`."""

import copy
import pickle

import pytest
import torch
from torch import nn

from ops import Pending, RMSNorm, replace_norms, restore_norms
from ops.adopt.norms import AdoptedNorm

from . import lookalikes
from .lookalikes import randomised

N = 24


def model():
    shared = lookalikes.Llama(N)
    blocks = nn.ModuleDict({"a": nn.LayerNorm(N), "b": shared, "c": nn.Linear(N, N), "d": shared, "e": nn.LayerNorm((1, N))})
    return nn.Sequential(blocks)


def test_lines_say_what_was_replaced_and_what_was_not(capsys):
    sites = replace_norms(model())
    assert capsys.readouterr().out.splitlines() == [str(site) for site in sites] == [
        "0.a: LayerNorm(24) → fused (LayerNorm, eps 1e-05)",
        "0.b: Llama(24) → fused (RMSNorm, eps 1e-06)",
        "0.e: LayerNorm(1, 24) → left alone (it normalises over the last 2 dimensions, (1, 24); the kernels over one)",
    ]  # fmt: skip


def test_a_shared_norm_stays_shared_and_everybody_keeps_the_module_they_hold():
    net = model()
    held = dict(net.named_modules(remove_duplicate=False))
    replace_norms(net, verbose=False)
    assert all(module is held[name] for name, module in net.named_modules(remove_duplicate=False))
    assert held["0.b"] is held["0.d"] and isinstance(held["0.d"], RMSNorm)


def test_parameters_state_dict_mode_and_hooks_stay_and_restoring_gives_back_the_class():
    net = model().eval()
    net[0].a.train()
    before = [(name, type(module), dict(vars(module))) for name, module in net.named_modules()]
    parameters, calls = dict(net.named_parameters()), []
    net[0].a.register_forward_hook(lambda *call: calls.append("hook"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    replace_norms(net, verbose=False)
    assert {name: id(p) for name, p in net.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert list(net.state_dict()) == list(model().state_dict())
    assert net[0].a.training and not net[0].b.training
    net[0].a(torch.randn(2, N)).square().sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert not torch.equal(net[0].a.bias, torch.zeros(N))

    assert restore_norms(net, verbose=False) == ["0.a: LayerNorm as it was", "0.b: Llama as it was"]
    after = [(name, type(module), dict(vars(module))) for name, module in net.named_modules()]
    assert [(name, cls, attributes.keys()) for name, cls, attributes in after] == [
        (name, cls, attributes.keys()) for name, cls, attributes in before
    ]


def test_replacing_twice_is_replacing_once():
    net = model()
    replace_norms(net, verbose=False)
    classes = [type(module) for module in net.modules()]
    assert not any(site.fused for site in replace_norms(net, verbose=False))
    assert [type(module) for module in net.modules()] == classes
    restore_norms(net, verbose=False)
    assert type(net[0].a) is nn.LayerNorm


def test_isinstance_goes_on_finding_what_it_found_and_decay_groups_find_lookalikes_too():
    norm = lookalikes.Llama(N)
    replace_norms(norm, verbose=False)
    assert isinstance(norm, lookalikes.Llama) and isinstance(norm, nn.RMSNorm)


def test_only_chooses():
    net = model()
    sites = replace_norms(net, only=lambda name, module: name.endswith("a"), verbose=False)
    assert [site.name for site in sites if site.fused] == ["0.a"]
    assert type(net[0].b) is lookalikes.Llama


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_replaced_norm_can_be_copied_and_pickled(copied, device):
    norm = randomised(lookalikes.Gemma(N)).to(device)
    replace_norms(norm, verbose=False)
    other = copied(norm)
    x = torch.randn(3, N, device=device)
    assert torch.equal(other(x), norm(x)) and other.weight is not norm.weight
    restore_norms(other, verbose=False)
    assert type(other) is lookalikes.Gemma


def test_a_replaced_norm_takes_the_stream_and_the_name_of_its_input(device):
    norm = lookalikes.Llama(N).to(device)
    replace_norms(norm, verbose=False)
    x, residual = torch.randn(2, 3, N, device=device)
    y, r = norm(hidden_states=x, residual=residual, prenorm=True)
    torch.testing.assert_close(r, x + residual)
    torch.testing.assert_close(y, lookalikes.Llama(N).to(device)(r))
    with pytest.raises(TypeError, match="got \\['input'\\]"):
        norm(input=x)


def test_eps_can_be_set_as_before(device):
    x = torch.randn(3, N, device=device)
    found = []
    for norm in (nn.LayerNorm(N).to(device), nn.LayerNorm(N).to(device)):
        if found:
            replace_norms(norm, verbose=False)
        norm.eps = 1.0
        found.append(norm(x))
    torch.testing.assert_close(*found)


def test_a_pending_is_not_taken_apart_in_silence(device):
    norm, x = nn.LayerNorm(N).to(device), torch.randn(3, N, device=device)
    replace_norms(norm, verbose=False)
    pending = Pending(x, x, 0.0)
    with pytest.raises(TypeError, match=r"\[\].* of a Pending.*hidden \+ residual"):
        pending[0]
    with pytest.raises(TypeError, match="got tuple; reentrant activation checkpointing"):
        norm(tuple(pending))
    with pytest.raises(TypeError, match="and residual was given"):
        norm(pending, residual=x)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: nn.LayerNorm(N)(x),
        lambda x: x + x,
        lambda x: torch.ones(N) + x,
        lambda x: 2 * x,
        lambda x: x.mean(1),
        lambda x: torch.cat([x, x]),
        lambda x: x.shape,
    ],
    ids=["a norm that is not replaced", "+", "a tensor +", "*", "mean", "cat", "shape"],
)
def test_a_pending_in_the_place_of_a_tensor_says_what_it_is_and_what_to_do(use):
    with pytest.raises((TypeError, AttributeError), match=r"of a Pending.*fuse every block of the stack"):
        use(Pending(torch.ones(3, N), torch.ones(3, N), 0.0))


def test_restoring_what_another_tool_has_changed_since_is_refused():
    norm = nn.LayerNorm(N)
    replace_norms(norm, verbose=False)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.ReLU())
    with pytest.raises(ValueError, match="was made a ParametrizedFusedLayerNorm by another tool"):
        restore_norms(norm, verbose=False)
    nn.utils.parametrize.remove_parametrizations(norm, "weight")
    restore_norms(norm, verbose=False)
    assert type(norm) is nn.LayerNorm


def test_restoring_what_somebody_wrapped_since_is_refused(device):
    norm, x = nn.LayerNorm(N).to(device), torch.randn(2, N, device=device)
    replace_norms(norm, verbose=False)
    norm.forward = lambda x, own=norm.forward: own(x)
    with pytest.raises(ValueError, match="wrapped on the instance after it was replaced"):
        restore_norms(norm)
    y = norm(x)
    del norm.forward
    restore_norms(norm, verbose=False)
    torch.testing.assert_close(norm(x), y)


def test_replacing_and_restoring_under_a_compiled_model_take_effect(device):
    torch._dynamo.reset()
    norm = nn.LayerNorm(N).to(device)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, N, device=device)
    expected = compiled(x)
    replace_norms(norm, verbose=False)
    norm.dropout_p = 0.9  # shows which of them runs
    assert (compiled(x) - expected).abs().max() > 0.1
    norm.dropout_p, norm.eps = 0.0, 1.0
    torch.testing.assert_close(compiled(x), nn.LayerNorm(N, eps=1.0).to(device)(x))
    restore_norms(norm, verbose=False)
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoder_layer_runs_ours_where_it_trains_and_its_own_kernel_where_it_does_not(norm_first, device, monkeypatch):
    layer = nn.TransformerEncoderLayer(N, 4, 2 * N, dropout=0.0, batch_first=True, norm_first=norm_first).to(device).eval()
    x = torch.randn(2, 5, N, device=device)
    expected = layer(x)
    replace_norms(layer, verbose=False)
    calls = []
    run = AdoptedNorm.forward
    monkeypatch.setattr(AdoptedNorm, "forward", lambda *args: (calls.append("ours"), run(*args))[1])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == ["ours", "ours"]
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    assert calls == ["ours", "ours"]  # it read the weights and ran a kernel of its own


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_a_replaced_norm(layout, device):
    norm = nn.LayerNorm(N).to(device)
    replace_norms(norm, verbose=False)
    rows = [torch.randn(n, N, device=device) for n in (3, 5)]
    with pytest.raises(ValueError, match="x is a nested tensor, expected a dense one"):
        norm(torch.nested.nested_tensor(rows, layout=layout))


def test_norms_with_one_weight_in_common_keep_it_in_common(device):
    net = nn.Sequential(nn.LayerNorm(N), nn.LayerNorm(N)).to(device)
    net[1].weight = net[0].weight
    x = torch.randn(3, N, device=device)
    (expected,) = torch.autograd.grad(net(x).sin().sum(), net[0].weight)
    assert all(site.fused for site in replace_norms(net, verbose=False)) and net[1].weight is net[0].weight
    torch.testing.assert_close(torch.autograd.grad(net(x).sin().sum(), net[0].weight)[0], expected, rtol=1e-4, atol=1e-5)


def test_only_modules_are_taken():
    with pytest.raises(TypeError, match=r"replace_norms: model must be a torch\.nn\.Module, got list"):
        replace_norms([nn.LayerNorm(N)])
    with pytest.raises(TypeError, match="replace_norms: only must be a function of a norm's name and module, got 'ln_f'"):
        replace_norms(nn.LayerNorm(N), only="ln_f")
    with pytest.raises(TypeError, match=r"restore_norms: model must be a torch\.nn\.Module, got list"):
        restore_norms([nn.LayerNorm(N)])
