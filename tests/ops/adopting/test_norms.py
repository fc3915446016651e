"""replace_norms and restore_norms: nothing but the forward of a norm changes. Whose norms are taken: `test_recognise`."""

import copy
import pickle

import pytest
import torch
from torch import nn

from ops import RMSNorm, replace_norms, restore_norms

from .lookalikes import Gemma, Llama, randomised
from .toys import classes

pytestmark = pytest.mark.usefixtures("kernel")

N = 24


@pytest.fixture
def replaced(device):
    norm = nn.LayerNorm(N).to(device)
    replace_norms(norm, verbose=False)
    return norm


@pytest.fixture
def x(device):
    torch.manual_seed(0)
    return torch.randn(3, N, device=device)


def model():
    shared = Llama(N)
    blocks = nn.ModuleDict({"a": nn.LayerNorm(N), "b": shared, "c": nn.Linear(N, N), "d": shared, "e": nn.LayerNorm((1, 2))})
    return nn.Sequential(blocks)


def test_lines_say_what_was_replaced_what_was_not_and_what_was_restored(capsys):
    net = model()
    sites = replace_norms(net)
    assert capsys.readouterr().out.splitlines() == [str(site) for site in sites] == [
        "0.a: LayerNorm(24) → fused (LayerNorm, eps 1e-05)",
        "0.b: Llama(24) → fused (RMSNorm, eps 1e-06)",
        "0.e: LayerNorm(1, 2) → left alone (its weights have shapes (1, 2), (1, 2); a norm has one or two vectors of one size)",
    ]  # fmt: skip
    lines = restore_norms(net)
    assert capsys.readouterr().out.splitlines() == lines == ["0.a: LayerNorm as it was", "0.b: Llama as it was"]


def test_modules_parameters_mode_hooks_and_isinstance_stay_and_restoring_gives_back_the_class():
    net = model().eval()
    net[0].a.train()
    held = dict(net.named_modules(remove_duplicate=False))
    before = [(name, type(module), {*vars(module)}) for name, module in net.named_modules()]
    parameters, calls = {name: id(p) for name, p in net.named_parameters()}, []
    net[0].a.register_forward_hook(lambda *call: calls.append("hook"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    replace_norms(net, verbose=False)
    assert all(module is held[name] for name, module in net.named_modules(remove_duplicate=False))
    assert all(isinstance(net[0].b, cls) for cls in (Llama, nn.RMSNorm, RMSNorm))  # as groups without decay look for
    assert {name: id(p) for name, p in net.named_parameters()} == parameters
    assert list(net.state_dict()) == list(model().state_dict())
    assert net[0].a.training and not net[0].b.training and repr(net[0].b) == "Llama(24, RMSNorm, eps 1e-06)"
    net[0].a(torch.randn(2, N)).square().sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert not torch.equal(net[0].a.bias, torch.zeros(N))

    restore_norms(net, verbose=False)
    assert [(name, type(module), {*vars(module)}) for name, module in net.named_modules()] == before


def test_only_chooses_and_a_second_call_replaces_the_rest_alone():
    net = model()
    for only, names in ((lambda name, module: name.endswith("a"), ["0.a"]), (None, ["0.b"]), (None, [])):
        assert [site.name for site in replace_norms(net, only=only, verbose=False) if site.fused] == names
        assert (type(net[0].b) is Llama) == (names == ["0.a"])
    restore_norms(net, verbose=False)
    assert classes(net) == classes(model())


class Forgetful(nn.LayerNorm):
    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "scratch"}


def test_what_a_module_leaves_out_of_its_copies_an_adopted_one_does_too():
    norm = Forgetful(N)
    norm.scratch = [1]
    replace_norms(norm, verbose=False)
    for copied in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert not hasattr(copied, "scratch") and copied.formula == norm.formula


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_replaced_norm_can_be_copied_and_pickled(copied, x):
    norm = randomised(Gemma(N)).to(x.device)
    replace_norms(norm, verbose=False)
    other = copied(norm)
    assert torch.equal(other(x=x), norm(x)) and other.weight is not norm.weight  # x by the name that it has in Gemma's forward
    restore_norms(other, verbose=False)
    assert type(other) is Gemma


def test_restoring_what_another_tool_has_changed_or_wrapped_since_is_refused(replaced):
    nn.utils.parametrize.register_parametrization(replaced, "weight", nn.ReLU())
    with pytest.raises(ValueError, match="another tool changed its class, to ParametrizedLayerNorm"):
        restore_norms(replaced)
    nn.utils.parametrize.remove_parametrizations(replaced, "weight")
    replaced.forward = lambda x, own=replaced.forward: own(x)
    with pytest.raises(ValueError, match="another tool changed its forward"):
        restore_norms(replaced)
    del replaced.forward
    restore_norms(replaced, verbose=False)
    assert type(replaced) is nn.LayerNorm


def test_replacing_and_restoring_under_a_compiled_model_take_effect(x):
    torch._dynamo.reset()
    norm = nn.LayerNorm(N).to(x.device)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    expected = compiled(x)
    replace_norms(norm, verbose=False)
    norm.eps = 1.0
    torch.testing.assert_close(compiled(x), nn.LayerNorm(N, eps=1.0).to(x.device)(x))
    restore_norms(norm, verbose=False)
    assert torch.equal(compiled(x), expected)


def test_torchs_encoder_layer_computes_what_it_did_with_and_without_its_own_kernel(device):
    layer = nn.TransformerEncoderLayer(N, 4, 2 * N, dropout=0.0, batch_first=True).to(device).eval()
    x = torch.randn(2, 5, N, device=device)
    expected = layer(x)
    replace_norms(layer, verbose=False)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


class Final(nn.LayerNorm):
    def __init_subclass__(cls):
        raise TypeError("Final has no subclasses")


def test_a_norm_whose_class_takes_no_subclass_is_left_alone_and_the_others_are_replaced():
    model = nn.Sequential(Final(N), nn.LayerNorm(N))
    left, taken = replace_norms(model, verbose=False)
    assert type(model[0]) is Final and "Final has no subclasses" in str(left)
    assert taken.fused and not left.fused
