"""Seeds that nobody gives: a function of the generator's state, many from one computation."""

import pytest
import torch

from ops import dropout_mask, layer_norm_fn, seeds

CPU = torch.device("cpu")


class Generator:
    """What is used of CUDA's, whose state is a seed and an offset."""

    def __init__(self, seed, offset=0):
        self.seed, self.offset = seed, offset

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0, "refused by CUDA's"
        self.offset = offset


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """The (seed, offset) of which seeds were computed, without those of other tests."""
    found, real = [], seeds.seeds_from
    monkeypatch.setattr(seeds, "_pools", {})
    monkeypatch.setattr(
        seeds, "seeds_from", lambda seed, offset, *rest: found.append((seed, offset)) or real(seed, offset, *rest)
    )
    return found


def draw(generator, stream=0):
    return seeds._next(generator, CPU, stream).item()


def split_mix_64(state):
    """As published, on Python's integers."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, 2**64 - 1])
def test_they_are_split_mix_64_of_seed_and_offset(seed):
    offset = 4 * 1000
    found = seeds.seeds_from(seed, offset, 50, CPU)
    start = split_mix_64(seed)
    expected = [split_mix_64((start + (1000 + i) * 0x9E3779B97F4A7C15) % 2**64) for i in range(50)]
    assert [value % 2**64 for value in found.tolist()] == expected


def test_neighbouring_generators_share_no_seed():
    drawn = torch.cat([seeds.seeds_from(seed, 0, 4096, CPU) for seed in range(64)])
    assert len(drawn.unique()) == len(drawn)
    ones = sum((drawn >> bit & 1).double().mean().item() for bit in range(64)) / 64
    assert abs(ones - 0.5) < 1e-3


def test_a_draw_is_a_function_of_the_generators_state(computed):
    generator = Generator(7)
    first = [draw(generator) for _ in range(5)]
    assert len(set(first)) == 5 and generator.offset == 20

    generator.offset = 8  # as activation checkpointing puts it back
    assert [draw(generator) for _ in range(3)] == first[2:]
    generator.offset += 400  # as other dropouts move it
    far = draw(generator)
    assert computed == [(7, 0)] and far not in first

    assert draw(Generator(7, 420)) == far and draw(Generator(8, 420)) != far
    assert draw(Generator(7, 8)) == first[2]


def test_seeds_are_computed_for_many_draws_at_once_and_anew_for_another_state_or_stream(computed):
    generator = Generator(3, 40)
    drawn = [draw(generator) for _ in range(seeds.AHEAD)]
    assert computed == [(3, 40)] and len(set(drawn)) == seeds.AHEAD
    draw(generator)
    assert computed == [(3, 40), (3, 40 + 4 * seeds.AHEAD)]
    draw(Generator(3, 0))  # before what is there
    draw(Generator(4, 0))
    assert computed[2:] == [(3, 0), (4, 0)]
    assert draw(Generator(4, 0), stream=1) == draw(Generator(4, 0)) and computed[4:] == [(4, 0)]


def test_what_was_drawn_in_inference_can_be_saved_for_backward():
    with torch.inference_mode():
        seeds._next(Generator(5), CPU, 0)
    assert not seeds._next(Generator(5, 4), CPU, 0).is_inference()


@pytest.mark.gpu
def test_eager_calls_draw_without_a_launch_and_masks_follow_torchs_generator(device, computed):
    x = torch.randn(64, 256, device=device)

    def masks(count=3):
        return [layer_norm_fn(x, None, None, dropout_p=0.5, return_dropout_mask=True)[1] for _ in range(count)]

    torch.manual_seed(1)
    first = masks()
    assert not torch.equal(first[0], first[1])
    state = torch.cuda.get_rng_state()
    between = torch.rand(1000, device=device)
    then = masks(1)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(1000, device=device), between) and torch.equal(masks(1)[0], then[0])
    torch.manual_seed(1)
    assert all(map(torch.equal, masks(), first))
    assert computed == [(1, 0)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.manual_seed(1)
        again = masks()
    torch.cuda.synchronize()
    assert all(map(torch.equal, again, first))


@pytest.mark.gpu
def test_a_captured_call_draws_anew_at_each_replay(device):
    x = torch.randn(64, 256, device=device)

    def mask():
        return layer_norm_fn(x, None, None, dropout_p=0.5, return_dropout_mask=True)[1]

    mask()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mask()
    found = []
    for _ in range(3):
        graph.replay()
        found.append(captured.clone())
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_an_int_seed_is_taken_modulo_2_to_the_64():
    assert [seeds.as_int64(n) for n in (0, -1, 2**63, 2**64 - 1, 2**64)] == [0, -1, -(2**63), -1, 0]
    assert torch.equal(dropout_mask(2**64 + 3, 4, 64, 0.5), dropout_mask(3, 4, 64, 0.5))
