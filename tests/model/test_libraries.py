"""Norms of other libraries: called as their interfaces say, and refused where they can't do what the model needs.

Their functions are made up here from their published signatures, since they need a GPU.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import configs
from configs import ConfigError, rules
from configs.machine import Machine
from model import libraries

CUDA = Machine("cuda")


def affine(norm, x, weight, bias, eps, out_dtype=None):
    y = F.rms_norm(x, weight.shape, weight, eps) if norm == "rms" else F.layer_norm(x, weight.shape, weight, bias, eps)
    return y.to(out_dtype or x.dtype)


def flash_layer_norm_fn(
    x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None, prenorm=False,
    residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, return_dropout_mask=False, out_dtype=None,
    out=None, residual_out=None,
):  # fmt: skip
    kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    z = sum(t.float() for t in (F.dropout(x, dropout_p), x1, residual) if t is not None).to(kept)
    outputs = [affine("rms" if is_rms_norm else "ln", z.float(), w, b, eps, out_dtype) for w, b in
               ((weight, bias), (weight1, bias1)) if w is not None]  # fmt: skip
    return (*outputs, z) if prenorm else outputs[0]


def liger_add(x, residual, weight, eps, offset=0.0, casting_mode="llama", in_place=False):
    assert x.dtype == residual.dtype and not in_place
    return affine("rms", (x + residual).float(), weight, None, eps, x.dtype), x + residual


def liger_rms(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    assert not in_place
    return affine("rms", x.float(), weight, None, eps, x.dtype)


def quack_rmsnorm(
    x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False, weight_offset=0.0
):
    z = (x.float() if residual is None else x.float() + residual).to(residual_dtype)
    y = affine("rms", z.float(), weight, None, eps, out_dtype)
    return (y, z) if prenorm else y


@pytest.fixture
def installed(monkeypatch):
    def put(name, **functions):
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    put("flash_attn.ops.triton.layer_norm", layer_norm_fn=flash_layer_norm_fn)
    put("liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=SimpleNamespace(apply=liger_add))
    put("liger_kernel.ops.rms_norm", LigerRMSNormFunction=SimpleNamespace(apply=liger_rms))
    put("liger_kernel.ops.layer_norm", LigerLayerNormFunction=SimpleNamespace(
        apply=lambda x, weight, bias, eps: affine("ln", x.float(), weight, bias, eps, x.dtype)))  # fmt: skip
    put("quack", rmsnorm=quack_rmsnorm)
    libraries._function.cache_clear()
    yield
    libraries._function.cache_clear()


@pytest.mark.parametrize("residual_dtype", ["fp32", "compute"])
@pytest.mark.parametrize(
    ("impl", "options"),
    [
        ("flash_attn", {"norm_kind": "layernorm"}),
        ("flash_attn", {"norm_kind": "rmsnorm", "block": "parallel"}),
        ("liger", {"norm_kind": "layernorm", "bias": False}),
        ("liger", {"norm_kind": "rmsnorm"}),
        ("quack", {"norm_kind": "rmsnorm"}),
    ],
)
def test_a_librarys_model_is_torchs_up_to_rounding(installed, build, batch, impl, options, residual_dtype):
    models = [build(norm_impl=name, residual_dtype=residual_dtype, **options) for name in (impl, "torch")]
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(*batch) for model in models]
    torch.testing.assert_close(*losses, atol=2**-7, rtol=0)
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=3e-3, rtol=0.05)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "norm.impl=flash_attn model.dropout=0.1 norm.dropout_masks=shared",
            "has no norm.dropout_masks=shared",
        ),
        (
            "norm.impl=flash_attn model.drop_path=0.1 model.block=parallel",
            "here, but model.drop_path=0",
        ),
        ("norm.impl=liger model.dropout=0.1", "has no model.dropout=0.1 here, but model.dropout=0"),
        ("norm.impl=liger model.block=parallel", "has no model.block=parallel here, but model.block=sequential"),
        ("norm.impl=quack", "has no norm.kind=layernorm here, but norm.kind=rmsnorm"),
        ("norm.impl=flash_attn model.dropout=0.1", None),
        ("norm.impl=liger norm.kind=rmsnorm", None),
        ("norm.impl=quack norm.kind=rmsnorm", None),
    ],
)
def test_what_a_library_can_not_do_is_refused_in_words(overrides, message, monkeypatch):
    monkeypatch.setattr(rules, "is_installed", lambda package: True)
    if message is None:
        configs.load(overrides.split(), on=CUDA)
        return
    with pytest.raises(ConfigError, match=message):
        configs.load(overrides.split(), on=CUDA)


def test_a_library_that_is_not_installed_or_a_device_that_it_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(rules, "is_installed", lambda package: False)
    with pytest.raises(ConfigError, match="needs the package liger-kernel, which is not installed"):
        configs.load(["norm.impl=liger"], on=CUDA)
    with pytest.raises(ConfigError, match="needs a CUDA device; this run is on cpu"):
        configs.load(["norm.impl=liger"], on=Machine("cpu"))
