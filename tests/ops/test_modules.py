"""The modules: in the place of torch.nn's."""

import copy

import pytest
import torch
import torch.nn.functional as F

from ops import LayerNorm, RMSNorm, layer_norm_fn


@pytest.mark.parametrize(("ours", "theirs"), [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)])
def test_a_module_is_one_of_torchs_with_its_parameters_and_checkpoints_interchange(ours, theirs, device):
    module, other = ours(32, device=device), theirs(32, eps=1e-5, device=device)
    assert isinstance(module, theirs)  # for groups without decay
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(other.state_dict())
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    x = torch.randn(4, 32, device=device)
    torch.testing.assert_close(module(x), other(x))
    # A block may pass them on.
    y = layer_norm_fn(x, module.weight, module.bias, x, eps=module.eps, is_rms_norm=isinstance(module, RMSNorm))
    torch.testing.assert_close(y, module(x, x))


def test_module_drops_in_training_mode_only(device):
    module = LayerNorm(64, dropout_p=0.5).to(device)
    x = torch.ones(4, 64, device=device)
    for training, values in ((True, [1.0, 3.0]), (False, [2.0])):
        _, r = module.train(training)(x, x, prenorm=True)
        assert r.unique().tolist() == values


def test_zero_centered_module_starts_as_the_identity_scale(device):
    module = RMSNorm(32, zero_centered_weight=True).to(device)
    x = torch.randn(4, 32, device=device)
    assert not module.weight.any()
    torch.testing.assert_close(module(x), F.rms_norm(x, (32,), eps=1e-5))
