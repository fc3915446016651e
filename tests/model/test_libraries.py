"""Norms of other libraries: called as their interfaces say, and refused where they can't do what the model needs."""

import pytest
import torch

import configs
from configs import ConfigError, rules
from configs.machine import Machine
from tests.runs import CPU

CUDA = Machine("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("residual_dtype", ["fp32", "compute"])
@pytest.mark.parametrize(
    ("impl", "package", "options"),
    [
        ("flash_attn", "flash_attn", {"norm_kind": "layernorm"}),
        ("flash_attn", "flash_attn", {"norm_kind": "rmsnorm", "block": "parallel"}),
        ("liger", "liger_kernel", {"norm_kind": "layernorm", "bias": False}),
        ("liger", "liger_kernel", {"norm_kind": "rmsnorm"}),
        ("quack", "quack", {"norm_kind": "rmsnorm"}),
    ],
)
def test_a_librarys_model_is_torchs_up_to_rounding(build, batch, impl, package, options, residual_dtype):
    pytest.importorskip(package)
    models = [build(norm_impl=name, residual_dtype=residual_dtype, width=128, **options).cuda() for name in (impl, "torch")]
    with torch.autocast("cuda", torch.bfloat16):
        losses = [model(*(part.cuda() for part in batch)) for model in models]
    torch.testing.assert_close(*losses, atol=2**-7, rtol=0)
    for loss in losses:
        loss.backward()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=3e-3, rtol=0.05)


@pytest.mark.parametrize(
    ("overrides", "on", "message"),
    [
        (
            "norm.impl=flash_attn model.dropout=0.1 norm.dropout_masks=shared",
            CUDA,
            "norm.dropout_masks=native; here model.dropout=0.1, norm.dropout_masks=shared",
        ),
        ("norm.impl=liger model.dropout=0.1", CUDA, "needs model.dropout=0; here model.dropout=0.1"),
        ("norm.impl=quack", CUDA, "needs norm.kind=rmsnorm; here norm.kind=layernorm"),
        ("norm.impl=liger", CPU, "needs a CUDA device; this run is on cpu"),
    ],
)
def test_what_a_library_can_not_do_is_refused_in_words(overrides, on, message, monkeypatch):
    monkeypatch.setattr(rules, "is_installed", lambda package: True)
    configs.load(["norm.impl=flash_attn", "model.dropout=0.1"], on=CUDA)
    configs.load(["norm.impl=quack", "norm.kind=rmsnorm"], on=CUDA)
    with pytest.raises(ConfigError, match=message):
        configs.load(overrides.split(), on=on)
