"""The dropout bits: published vectors, the layout of draws, statistics, the same mask everywhere; seeds that nobody gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops import dropout_mask, layer_norm_fn, philox, seeded_dropout
from ops.philox import draws, drop_threshold, keep_scale

from .cases import reference_path

CPU = torch.device("cpu")
# D. E. Shaw Research, Random123, tests/kat_vectors, lines "philox4x32 7": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def test_draws_are_the_published_vectors_in_the_reference_and_the_kernel(device):
    for counter, key, output in KNOWN_ANSWERS:
        found = philox.philox(tuple(torch.tensor(words(key))), tuple(torch.tensor(words(counter))))
        assert [int(word) for word in found] == words(output)
    # Row 0, columns 0…7, seed 0, stream 0 is the counter and key of all zeros: a threshold just above a draw drops it.
    expected = [half for word in words(KNOWN_ANSWERS[0][2]) for half in (word & 0xFFFF, word >> 16)]
    assert draws(torch.tensor([0]), 1, 8, 0)[0].tolist() == expected
    for col, draw in enumerate(expected):
        assert dropout_mask(0, 1, 8, draw / 65536, device=device)[0, col]
        assert not dropout_mask(0, 1, 8, (draw + 1) / 65536, device=device)[0, col]


def test_compiled_draws_are_those_of_eager_code():
    """Trap: products that leave int64 are undefined in the C++ that torch.compile makes for the CPU."""
    seed = torch.tensor([10**15])
    compiled = torch.compile(draws, fullgraph=True)
    assert torch.equal(compiled(seed, 64, 40, 0), draws(seed, 64, 40, 0))


def test_counter_words_are_group_row_low_row_high_stream():
    key = tuple(torch.tensor(word) for word in (0xA4093822, 0x299F31D0))
    expected = philox.philox(key, tuple(torch.tensor(word) for word in (2, 2, 0, 1)))
    found = draws(torch.tensor([0x299F31D0_A4093822]), 3, 24, stream=1)[2, 16:].tolist()
    assert found == [half for word in expected for half in (int(word) & 0xFFFF, int(word) >> 16)]


@settings(max_examples=25, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 9), st.integers(1, 70), st.floats(0.001, 0.999), st.integers(0, 1))
def test_kernel_mask_equals_reference_mask(seed, rows, cols, p, stream):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mask = dropout_mask(seed, rows, cols, p, stream, device)
    with reference_path():
        assert torch.equal(mask, dropout_mask(seed, rows, cols, p, stream, device))


@given(p=st.floats(0.0, 1.0, exclude_max=True))
def test_the_estimate_is_as_unbiased_as_the_threshold_allows_for_every_p(p):
    kept = 1 - drop_threshold(p) / 65536
    assert kept > 0
    assert kept * keep_scale(p) == pytest.approx(1.0, abs=2**-17 / max(1 - p, 2**-17) + 1e-12)
    assert abs((1 - kept) - p) <= 1 / 65536


@pytest.mark.parametrize(("n", "apart", "stream"), [(30, 30, 0), (1000, 1001, 1), (72, 76, 0), (33, 40, 1)])
def test_seeded_dropout_and_its_backward_drop_what_the_norm_drops_also_of_rows_that_lie_apart(n, apart, stream, device):
    x = torch.randn(3, 4, apart, device=device)[..., :n].requires_grad_()
    y, g = seeded_dropout(x, 0.3, 5, stream), torch.randn(3, 4, n, device=device)
    keep = dropout_mask(5, 12, n, 0.3, stream, device).view(3, 4, n)  # rows count over all leading dimensions
    (dx,) = torch.autograd.grad(y, x, g)
    assert torch.equal(y == 0, ~keep) and torch.allclose(dx, g * keep * keep_scale(0.3))
    x, x1 = (x, 0 * x) if stream == 0 else (0 * x, x)
    _, r, *masks = layer_norm_fn(x, None, None, x1=x1, dropout_p=0.3, prenorm=True, return_dropout_mask=True, seed=5)
    assert torch.equal(r, y) and torch.equal(masks[stream], keep)


def test_seed_may_be_an_int_or_a_tensor_of_one_element(device):
    x = torch.randn(4, 16, device=device)
    seeds = torch.tensor([5, 6], device=device)
    for seed in (seeds[0], seeds[:1], 5, 2**64 + 5):
        assert torch.equal(seeded_dropout(x, 0.5, seed), seeded_dropout(x, 0.5, 5))
    assert not torch.equal(seeded_dropout(x, 0.5, seeds[1]), seeded_dropout(x, 0.5, 5))
    assert torch.equal(seeded_dropout(x, 0.5, 2**64 - 1), seeded_dropout(x, 0.5, -1))


def masks(x, count=1):
    return [layer_norm_fn(x, None, None, dropout_p=0.5, return_dropout_mask=True)[1] for _ in range(count)]


class Generator:
    """What is used of CUDA's, whose state is a seed and an offset."""

    def __init__(self, seed, offset=0):
        self.initial_seed, self.offset = (lambda: seed), offset

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0, "refused by CUDA's"
        self.offset = offset

    def draw(self, count=1, stream=0):
        return [philox._next(self, CPU, stream).item() for _ in range(count)]


@pytest.fixture
def computed(monkeypatch):
    """The (seed, offset, count) of which seeds were computed, without those of other tests."""
    found, real = [], philox.seeds_from
    monkeypatch.setattr(philox, "_pools", {})
    monkeypatch.setattr(philox, "seeds_from", lambda *state: found.append(state[:3]) or real(*state))
    return found


def split_mix_64(state):
    """As published, on Python's integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_drawn_seeds_are_split_mix_64_of_seed_and_offset():
    for seed in (0, 1, 2**40 + 7, 2**64 - 1):
        found = torch.cat([philox.seeds_from(seed, 4 * 1000, 1, CPU), philox.seeds_from(seed, 4 * 1000, 50, CPU)[1:]])
        expected = [split_mix_64((split_mix_64(seed) + (1000 + i) * 0x9E3779B97F4A7C15) % 2**64) for i in range(50)]
        assert [value % 2**64 for value in found.tolist()] == expected


def test_a_draw_is_a_function_of_the_generators_state_and_many_are_computed_where_draws_are_in_a_row(computed):
    generator, singles = Generator(7), philox.SINGLES
    first = generator.draw(singles + 100)
    assert len(set(first)) == len(first) and generator.offset == 4 * len(first)
    in_a_row = [(7, 4 * i, 1) for i in range(singles)]
    assert computed == [*in_a_row, (7, 4 * singles, philox.AHEAD)]
    generator.offset = 4 * singles  # as activation checkpointing puts it back
    assert generator.draw(3) == first[singles : singles + 3] and len(computed) == singles + 1
    for block in range(1, 20):  # as the dropout of attention moves it, once in two draws
        generator.offset = 50_000 * block
        assert not {*generator.draw(2)} & {*first}
    assert len(computed) == singles + 1
    for block in range(1, 20):  # farther than a pool reaches
        generator.offset = 2**21 * block
        generator.draw(2)
    assert {count for *_, count in computed[singles + 1 :]} == {1}
    assert Generator(8, 4).draw() != Generator(7, 4).draw() == first[1:2]
    assert Generator(3).draw() == Generator(3).draw(stream=1) and computed[-2:] == [(3, 0, 1)] * 2


def test_what_was_drawn_in_inference_can_be_saved_for_backward(computed):
    with torch.inference_mode():
        Generator(5).draw()
    assert not philox._next(Generator(5, 4), CPU, 0).is_inference()


@pytest.mark.gpu
def test_eager_calls_in_a_row_draw_without_a_launch_and_masks_follow_torchs_generator(device, computed):
    x, draws = torch.randn(64, 256, device=device), philox.SINGLES + 3
    torch.manual_seed(1)
    first = masks(x, draws)
    assert not torch.equal(first[-2], first[-1])
    state = torch.cuda.get_rng_state()
    between, then = torch.rand(1000, device=device), masks(x)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(1000, device=device), between) and torch.equal(masks(x)[0], then[0])
    torch.manual_seed(1)
    assert all(map(torch.equal, masks(x, draws), first))
    at = 4 * philox.SINGLES
    assert [of for of in computed if of != (1, of[1], 1) or of[1] >= at] == [(1, at, philox.AHEAD)] * 2


@pytest.mark.gpu
def test_a_captured_call_draws_anew_at_each_replay(device):
    x = torch.randn(64, 256, device=device)
    masks(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = masks(x)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(captured.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])
