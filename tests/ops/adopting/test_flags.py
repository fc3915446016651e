"""A flag that is set after `adopt`, or an argument, sends a block another way: it computes what it would have computed."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops import adopt

from .toys import N, block_of, second_half


def half_of_gradient(x):
    if x.requires_grad:
        x.register_hook(lambda g: 0.5 * g)


def hook_on_a_sum(self, x, y=None):
    x = x + self.attn(self.ln_1(x))
    if self.flag:
        half_of_gradient(x)
    return second_half(self, x)


def hook_on_its_input(self, x, y=None):
    if self.flag:
        half_of_gradient(x)
    return second_half(self, x + self.attn(self.ln_1(x)))


def gradient_of_a_sum(self, x, y=None):
    x = x + self.attn(self.ln_1(x))
    if self.flag and x.requires_grad:
        x.retain_grad()
        self.kept.append(x)
    return second_half(self, x)


def frozen_norms(self, x, y=None):
    with torch.set_grad_enabled(not self.flag):
        h = self.ln_1(x)
    x = x + self.attn(h)
    with torch.set_grad_enabled(not self.flag):
        h = self.ln_2(x)
    return x + self.mlp(h)


def dropout_in_place(self, x, y=None):
    h = self.attn(self.ln_1(x))
    F.dropout(h, 1.0, self.flag, inplace=True)  # all of it
    return second_half(self, x + h)


def same_tensor_twice(self, x, y=None):
    h = self.ln_1(x)
    return second_half(self, x + self.attn(h if y is x else 2 * h))


WAYS = (hook_on_a_sum, hook_on_its_input, gradient_of_a_sum, frozen_norms, dropout_in_place, same_tensor_twice)


@pytest.mark.parametrize("forward", WAYS, ids=lambda way: way.__name__)
def test_a_block_that_goes_another_way_computes_what_it_did(forward, device):
    torch.manual_seed(0)
    plain = block_of(forward, flag=False, kept=[]).to(device)
    ours, x = copy.deepcopy(plain), torch.randn(2, 3, N, device=device)
    assert adopt(ours, verbose=False).blocks
    plain.flag = ours.flag = True
    torch.testing.assert_close(*[results(block, x) for block in (ours, plain)], rtol=1e-4, atol=1e-5)


def results(block, x) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    stream = leaf * 1
    y = block(stream, stream)
    y.sin().sum().backward()
    gradients = [t.grad for t in (leaf, *block.parameters(), *block.kept) if t.grad is not None]
    return [y, *gradients]


@dataclass
class Result:
    stream: Tensor
    branch: Any = None


class Opaque:
    def __init__(self, stream):
        self.stream = stream


def as_dataclass(self, x):
    return Result(second_half(self, x + self.attn(self.ln_1(x))))


def with_its_branch(self, x):
    h = self.attn(self.ln_1(x))
    return Result(second_half(self, x + h), h)


def as_object(self, x):
    return Opaque(second_half(self, x + self.attn(self.ln_1(x))))


def keeps_branches(self, x):
    h = self.attn(self.ln_1(x))
    self.kept.append(h)
    return second_half(self, x + h)


@pytest.mark.parametrize("forward", [as_dataclass, with_its_branch, as_object, keeps_branches], ids=lambda way: way.__name__)
def test_what_a_block_returns_or_keeps_is_tensors_and_compared(forward, device):
    torch.manual_seed(0)
    plain = block_of(forward, kept=[]).to(device)
    ours, x = copy.deepcopy(plain), torch.randn(2, 3, N, device=device)
    found = adopt(ours, verbose=False)
    assert bool(found.blocks) is (forward is as_dataclass)
    if forward is as_object:
        return
    of_ours, of_plain = ([block(x), *block.kept] for block in (ours, plain))
    for a, b in zip(of_ours, of_plain, strict=True):
        a, b = ([*vars(t).values()] if isinstance(t, Result) else [t] for t in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
