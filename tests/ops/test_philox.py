"""The dropout bits: published vectors, the layout of draws, statistics, the same mask everywhere."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import dropout_mask, layer_norm_fn, seeded_dropout
from ops.philox import draws, drop_threshold, keep_scale, philox

from .cases import reference_path

# D. E. Shaw Research, Random123, tests/kat_vectors, lines "philox4x32 7": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_reference_philox_gives_the_published_vectors(counter, key, output):
    found = philox(tuple(torch.tensor(words(key))), tuple(torch.tensor(words(counter))))
    assert [int(word) for word in found] == words(output)


def test_kernel_draws_are_the_published_vector():
    """Row 0, columns 0…7, seed 0, stream 0 is the counter and key of all zeros: a threshold just above a draw drops it."""
    expected = [half for word in words(KNOWN_ANSWERS[0][2]) for half in (word & 0xFFFF, word >> 16)]
    assert draws(torch.tensor([0]), 1, 8, 0)[0].tolist() == expected
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for col, draw in enumerate(expected):
        assert dropout_mask(0, 1, 8, draw / 65536, device=device)[0, col]
        assert not dropout_mask(0, 1, 8, (draw + 1) / 65536, device=device)[0, col]


def test_counter_words_are_group_row_low_row_high_stream():
    seed = 0x299F31D0_A4093822
    found = draws(torch.tensor([seed]), 3, 24, stream=1)[2, 16:].tolist()
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
    expected = philox(key, tuple(torch.tensor(word) for word in (2, 2, 0, 1)))
    assert found == [half for word in expected for half in (int(word) & 0xFFFF, int(word) >> 16)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    rows=st.integers(1, 9),
    cols=st.integers(1, 70),
    p=st.floats(0.001, 0.999),
    stream=st.integers(0, 1),
)
def test_kernel_mask_equals_reference_mask(seed, rows, cols, p, stream):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = dropout_mask(seed, rows, cols, p, stream, device)
    with reference_path():
        assert torch.equal(mask, dropout_mask(seed, rows, cols, p, stream, device))


@pytest.mark.parametrize("n", [1, 8, 40, 300])
def test_fused_mask_equals_reference_mask_for_every_tile_class(n, device, request):
    x = torch.randn(6, n, device=device)
    for looped in (False, True):
        if looped:
            request.getfixturevalue("narrow_tiles")
        *_, mask, mask1 = layer_norm_fn(x, None, None, x1=x, dropout_p=0.4, return_dropout_mask=True, seed=99)
        for found, stream in ((mask, 0), (mask1, 1)):
            with reference_path():
                assert torch.equal(found, dropout_mask(99, 6, n, 0.4, stream, device)), (n, looped, stream)


def test_mask_counts_rows_over_all_leading_dimensions(device):
    x = torch.randn(2, 3, 4, 24, device=device)
    *_, mask, _ = layer_norm_fn(x, None, None, dropout_p=0.5, return_dropout_mask=True, seed=3)
    assert torch.equal(mask.view(24, 24), dropout_mask(3, 24, 24, 0.5, device=device))


def test_dropped_share_is_p_and_neighbours_are_independent():
    mask = draws(torch.tensor([12345]), 2000, 1000, 0) >= drop_threshold(0.1)
    n = mask.numel()
    sigma = (0.1 * 0.9 / n) ** 0.5
    assert abs((~mask).double().mean().item() - 0.1) < 4 * sigma + 1 / 65536
    centred = mask.double() - mask.double().mean()
    for shift, dim in ((1, 1), (8, 1), (1, 0)):
        correlation = (centred * centred.roll(shift, dim)).mean() / centred.square().mean()
        assert abs(correlation.item()) < 4 / n**0.5


def test_draws_are_uniform_over_16_bits():
    counts = np.bincount(draws(torch.tensor([7]), 4000, 800, 0).flatten().numpy() >> 8, minlength=256)
    expected = counts.sum() / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - 255) < 5 * (2 * 255) ** 0.5


def test_no_two_rows_share_a_mask():
    """A 32-bit seed per row would make two of 131072 rows drop the same elements with probability 86 %."""
    rows = draws(torch.tensor([1]), 131072, 8, 0)
    assert len(torch.unique(rows, dim=0)) == 131072


@given(p=st.floats(0.0, 1.0, exclude_max=True))
def test_the_estimate_is_as_unbiased_as_the_threshold_allows_for_every_p(p):
    kept = 1 - drop_threshold(p) / 65536
    assert kept > 0
    assert kept * keep_scale(p) == pytest.approx(1.0, abs=2**-17 / max(1 - p, 2**-17) + 1e-12)
    assert abs((1 - kept) - p) <= 1 / 65536


@pytest.mark.parametrize("p", [0.1, 0.27, 0.5, 0.9])
def test_what_is_kept_is_scaled_as_pytorch_scales_it(p, device):
    x = torch.randn(64, 64, device=device)
    kept = F.dropout(x, p)
    ours = seeded_dropout(x, p, 0)
    both = (kept != 0) & (ours != 0)
    assert both.any()
    torch.testing.assert_close(ours[both], kept[both], rtol=2**-22, atol=0)


@pytest.mark.parametrize("stream", [0, 1])
def test_seeded_dropout_drops_what_the_fused_operator_drops(stream, device):
    x = torch.randn(7, 50, device=device)
    zero = torch.zeros_like(x)
    branches = (x, zero) if stream == 0 else (zero, x)
    _, r = layer_norm_fn(branches[0], None, None, x1=branches[1], dropout_p=0.3, prenorm=True, seed=11)
    assert torch.equal(seeded_dropout(x, 0.3, 11, stream), r)


@pytest.mark.parametrize("n, apart", [(1000, 1001), (72, 76), (33, 40)])
def test_rows_may_lie_apart_by_what_does_not_divide_as_their_width_does(n, apart, device):
    x = torch.randn(5, apart, device=device)[:, :n]
    assert not x.is_contiguous()
    assert torch.equal(seeded_dropout(x, 0.3, 5), seeded_dropout(x.contiguous(), 0.3, 5))


def test_seeded_dropout_backward_uses_the_same_mask(device):
    x = torch.randn(3, 4, 30, device=device, requires_grad=True)
    y = seeded_dropout(x, 0.3, 5)
    g = torch.randn_like(x)
    y.backward(g)
    keep = dropout_mask(5, 12, 30, 0.3, device=device).view(3, 4, 30)
    assert torch.equal(y == 0, ~keep)
    assert torch.allclose(x.grad, g * keep * keep_scale(0.3))


def test_seed_may_be_an_int_or_a_tensor_of_one_element(device):
    x = torch.randn(4, 16, device=device)
    seeds = torch.tensor([5, 6], device=device)
    for seed in (seeds[0], seeds[:1], 5):
        assert torch.equal(seeded_dropout(x, 0.5, seed), seeded_dropout(x, 0.5, 5))
    assert not torch.equal(seeded_dropout(x, 0.5, seeds[1]), seeded_dropout(x, 0.5, 5))
    assert torch.equal(seeded_dropout(x, 0.5, 2**64 - 1), seeded_dropout(x, 0.5, -1))


def test_default_seed_comes_from_torchs_generator(device):
    x = torch.randn(4, 64, device=device)
    masks = []
    for manual_seed in (1, 1, 2):
        torch.manual_seed(manual_seed)
        masks.append(layer_norm_fn(x, None, None, dropout_p=0.5, return_dropout_mask=True)[1])
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
