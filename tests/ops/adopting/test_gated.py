"""Gated norms of transformers, and of classes that only look like one."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from ops import adopt, replace_norms, restore_norms
from ops.adopting.gated import AdoptedGatedNorm

from ..cases import Seen

CLASSES = {  # the model's folder, and what its class is made with: half of them share a class's text
    "qwen3_next.Qwen3NextRMSNormGated": {"eps": 1e-5},
    "qwen3_5.Qwen3_5RMSNormGated": {},
    "olmo_hybrid.OlmoHybridRMSNormGated": {},
    "kimi_linear.KimiLinearRMSNormGated": {},
    "mamba2.MambaRMSNormGated": {"group_size": 48},
    "zamba2.Zamba2RMSNormGated": {"group_size": 16},
    "nemotron_h.NemotronHRMSNormGated": {"group_size": 24, "eps": 1e-5},
    "falcon_h1.FalconH1RMSNormGated": {"n_groups": 3},
}


def theirs(name: str) -> nn.Module:
    folder, cls = name.split(".")
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    norm = getattr(modeling, cls)(48, **CLASSES[name])
    norm.weight.data = torch.linspace(-1, 2, 48)
    return norm


def results(norm, *dtypes):
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(2, 3, 48, generator=generator).to(norm.weight.device, dtype).requires_grad_() for dtype in dtypes)
    y = norm(x, gate=z)
    return [y, *torch.autograd.grad(y.float().square().sum(), (x, z, norm.weight))]


@pytest.mark.parametrize("name", CLASSES)
def test_gated_norms_of_transformers_give_the_same_in_one_kernel_and_are_given_back(name, device, kernel):
    norm = theirs(name).to(device)
    plain = copy.deepcopy(norm)
    (site,) = replace_norms(norm, verbose=False)
    assert site.fused and isinstance(norm, type(plain))
    for dtypes, off in (((torch.float32,) * 2, 1e-5), ((torch.bfloat16,) * 2, 2e-2), ((torch.bfloat16, torch.float32), 2e-2)):
        with Seen() as seen:
            found = results(norm, *dtypes)
        assert "gated_rms_norm_forward" in seen.names
        for mine, own in zip(found, results(plain, *dtypes), strict=True):
            assert mine.dtype == own.dtype
            assert (mine - own).norm() <= off * own.norm()
    assert isinstance(pickle.loads(pickle.dumps(norm)), AdoptedGatedNorm)
    assert len(restore_norms(norm, verbose=False)) == 1 and type(norm) is type(plain)


def test_without_a_gate_the_own_forward_runs():
    norm, x = theirs("mamba2.MambaRMSNormGated"), torch.linspace(-1, 1, 96).view(2, 48)
    expected = norm(x)
    replace_norms(norm, verbose=False)
    assert torch.equal(norm(x), expected)


def test_the_result_of_a_transposed_input_lies_in_memory_as_before():
    norm, x = theirs("qwen3_next.Qwen3NextRMSNormGated"), torch.linspace(-1, 1, 480).view(5, 2, 48).transpose(0, 1)
    expected = norm(x, gate=x)
    replace_norms(norm, verbose=False)
    assert norm(x, gate=x).stride() == expected.stride()
    assert norm(x[:, :, :32].repeat(1, 1, 2)[..., :48], gate=x).is_contiguous()


class Other(nn.Module):
    """RMSNorm times the gate, but for one thing."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight, self.eps, self.what = nn.Parameter(torch.ones(48)), 1e-6, what

    def forward(self, x, gate):
        statistic = x.pow(2).mean(-1, keepdim=True)
        statistic = statistic.detach() if self.what == "detached" else statistic
        gate = torch.tanh(gate) if self.what == "tanh" else nn.functional.silu(gate)
        y = x * torch.rsqrt(statistic + (1e-5 if self.what == "another eps" else self.eps)) * self.weight * gate
        return y.clamp(-3, 3) if self.what == "clamped" else y


class GatedRMSNorm(Other):
    """With the name of ours."""


def test_one_that_calls_a_function_is_fused_and_told_of_as_that():
    class GatedNorm(GatedRMSNorm):
        def forward(self, x, gate):
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.eps) * nn.functional.silu(gate)

    assert str(adopt(nn.ModuleList([GatedNorm("")]), blocks=False, verbose=False)) == "0: GatedNorm(48), fused"


def test_a_gate_of_another_dtype_changes_that_of_the_output_as_before():
    norm, x, z = GatedRMSNorm("as it is").bfloat16(), torch.ones(2, 48, dtype=torch.bfloat16), torch.ones(2, 48)
    expected = norm(x, z)
    assert expected.dtype == torch.float32
    assert replace_norms(norm, verbose=False)[0].fused
    torch.testing.assert_close(norm(x, z), expected)


def test_a_weight_that_a_parametrization_computes():
    norm, x, z = GatedRMSNorm("as it is"), *torch.linspace(-1, 1, 192).view(2, 2, 48)
    expected = 2 * norm(x, z)
    replace_norms(norm, verbose=False)
    twice = nn.Identity()
    twice.forward = lambda weight: 2 * weight
    parametrize.register_parametrization(norm, "weight", twice)
    torch.testing.assert_close(norm(x, z), expected)
    with pytest.raises(RuntimeError, match="only supported through state_dict"):
        pickle.dumps(norm)


@pytest.mark.parametrize("what", ["as it is", "detached", "tanh", "another eps", "clamped"])
def test_what_computes_something_else_is_left_alone(what):
    class GatedNorm(Other):
        pass

    (site,) = replace_norms(GatedNorm(what), verbose=False)
    assert site.fused == (what == "as it is")


def test_adopt_replaces_those_of_a_qwen3_next_layer_and_undoes_it():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = modeling.Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )  # fmt: skip
    layer, x = modeling.Qwen3NextGatedDeltaNet(config, 0), torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32)
    expected = layer(x)
    adoption = adopt(layer, verbose=False)
    assert isinstance(layer.norm, AdoptedGatedNorm)
    torch.testing.assert_close(layer(x), expected)
    adoption.undo()
    assert torch.equal(layer(x), expected)
