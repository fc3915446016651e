import pytest
import torch

from benchmarks.cases import BACKWARD, CASES, FORWARD, MAX_ELEMENTS, Setting, capped_rows, make_inputs, minimum_bytes

ELEMENTS = 32768 * 768


@pytest.mark.parametrize(
    "case, direction, residual_bytes, per_element",
    [
        ("ln", FORWARD, None, 4),
        ("rms", FORWARD, None, 4),
        ("add_rms", FORWARD, 2, 8),
        ("add_ln", FORWARD, 4, 12),
        ("dropout_add_ln", FORWARD, 4, 12),  # anchors: 25 sites × (12 + 16 bytes)
        ("ln", BACKWARD, None, 3 * 2),
        ("rms", BACKWARD, None, 3 * 2),
        ("add_rms", BACKWARD, 2, 4 * 2),
        ("dropout_add_ln", BACKWARD, 2, 5 * 2),
        ("dropout_add_ln", BACKWARD, 4, 16),
        ("add_rms", BACKWARD, 4, 16),  # dx is not the gradient of the residual where the dtypes differ
    ],
)
def test_minimum_bytes_are_those_of_the_anchors(case, direction, residual_bytes, per_element):
    assert minimum_bytes(CASES[case], direction, 32768, 768, 2, residual_bytes) == ELEMENTS * per_element


def test_rows_are_fewer_only_where_elements_would_be_too_many():
    assert capped_rows(32768, 16384) == 32768
    assert capped_rows(32768, 65536) * 65536 == MAX_ELEMENTS
    assert capped_rows(4096, 65536) == 4096


def test_inputs_have_what_the_case_needs_and_share_weights():
    setting = Setting(residual_dtype=torch.float32)
    first, second = make_inputs(CASES["dropout_add_ln"], setting, 4, 8, 2, torch.device("cpu"))

    assert [t.dtype for t in first.leaves] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    assert all(t.requires_grad for t in first.leaves)
    assert [t.dtype for t in first.upstream] == [torch.bfloat16, torch.float32]
    assert first.weight is second.weight and not torch.equal(first.x, second.x)
    (rms,) = make_inputs(CASES["rms"], Setting(), 4, 8, 1, torch.device("cpu"))
    assert rms.residual is None and rms.bias is None and len(rms.upstream) == 1
