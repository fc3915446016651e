"""Seeds depend on where a run stands and on nothing else."""

import itertools

import torch

from training.step import seed_micro_batch


def test_seeds_do_not_depend_on_what_was_drawn_before():
    first = seed_micro_batch(1, 5, 0, 0, sites=9)
    draw = torch.rand(3)
    torch.rand(1000)

    again = seed_micro_batch(1, 5, 0, 0, sites=9)

    assert torch.equal(first, again)
    assert torch.equal(draw, torch.rand(3))


def test_seed_step_micro_batch_rank_and_site_each_give_other_seeds():
    places = itertools.product((1, 2), range(10), range(4), range(4))
    seeds = torch.cat([seed_micro_batch(*place, sites=9) for place in places])

    assert len(seeds.unique()) == len(seeds) == 2 * 10 * 4 * 4 * 9


def test_seeds_are_int64_on_the_cpu_and_not_negative():
    seeds = torch.cat([seed_micro_batch(3, step, 0, 0, sites=50) for step in range(50)])

    assert (seeds.dtype, seeds.device.type) == (torch.int64, "cpu")
    assert seeds.min() >= 0
    assert seeds.max() > 2**62  # all bits but the sign are in use
