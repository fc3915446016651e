"""The program that points FlashAttention's tests at ours, on a checkout that the test makes up."""

import pytest

from . import flash_suite

KERNELS = """
from flash_attn.utils.torch import marker
layer_norm_fn = rms_norm_fn = layer_norm_linear_fn = RMSNorm = None
layer_norm_ref = rms_norm_ref = lambda: marker
"""
SUITE = """
import torch
import flash_attn.ops.triton.layer_norm as module

def test_what_it_meets():
    ours = [getattr(module, name).__module__ for name in ("layer_norm_fn", "rms_norm_fn", "layer_norm_linear_fn", "RMSNorm")]
    assert all(name.split(".")[0] == "ops" for name in ours), ours
    assert module.layer_norm_ref() == module.rms_norm_ref() == "the checkout's"
    torch.random.manual_seed(0)
    assert torch.initial_seed() == 3
"""


@pytest.fixture
def checkout(tmp_path):
    for name, text in {
        flash_suite.KERNELS: KERNELS,
        flash_suite.SUITE: SUITE,
        f"{flash_suite.UTILS}/__init__.py": "",
        f"{flash_suite.UTILS}/torch.py": 'marker = "the checkout\'s"',
    }.items():
        path = tmp_path / "flash-attention" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "flash-attention"


def test_the_tests_meet_our_functions_beside_their_formulas_at_the_seed_that_was_asked_for(checkout, capfd):
    assert flash_suite.main(["--seed", "3", str(checkout)]) == 0
    assert "1 passed" in capfd.readouterr().out


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        flash_suite.main([str(tmp_path)])
    assert "has no flash_attn/ops/triton/layer_norm.py; expected a checkout of flash-attention" in capsys.readouterr().err
