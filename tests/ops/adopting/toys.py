"""Blocks as model code has them, small."""

import copy

import torch
from torch import nn

from ops import fuse_prenorm_block, replace_norms

N = 16


class Sublayer(nn.Module):
    """A mixer or MLP that takes more than x, and drops its output last."""

    def __init__(self, p=0.0, dropout="dropout"):
        super().__init__()
        self.linear, self.last = nn.Linear(N, N), dropout
        setattr(self, dropout, nn.Dropout(p))

    def forward(self, x, scale=1.0, causal=False, **ignored):
        return getattr(self, self.last)(torch.tanh(self.linear(x)) * scale * (2.0 if causal else 1.0))


class Block(nn.Module):
    def __init__(self, p=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(N), Sublayer(p, "resid_dropout"), norm(N), Sublayer(p)

    def forward(self, x, scale=1.0):
        return second_half(self, first_half(self, x, scale=scale))


def first_half(self, x, *args, **kwargs):
    return x + self.attn(self.ln_1(x), *args, **kwargs)


def second_half(self, x):
    return x + self.mlp(self.ln_2(x))


def nothing(self, x):
    return second_half(self, first_half(self, x))


def block_of(forward, **parts):
    """A block with another forward and these parts more, or in place of its own."""
    block = type("OtherBlock", (Block,), {"forward": forward})()
    for name, part in parts.items():
        setattr(block, name, part)
    return block


class Model(nn.Module):
    def __init__(self, p=0.0, norm=nn.LayerNorm, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p, norm) for _ in range(depth))
        self.final = norm(N)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, 0.5)
        return self.final(x)


def fused(model, **how):
    model = copy.deepcopy(model)
    replace_norms(model, verbose=False)
    fuse_prenorm_block(model.blocks, **how)
    return model


def nodes_behind(y):
    """The nodes of the graph of y, which has to stay alive."""
    nodes, todo = set(), [y.grad_fn]
    while todo:
        if (node := todo.pop()) is not None and node not in nodes:
            nodes.add(node)
            todo += [other for other, _ in node.next_functions]
    return nodes


def classes(module):
    return [type(part) for part in module.modules()]
