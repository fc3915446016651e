"""A stand-in for nanoGPT's model.py, written from its public interface; as text, since the program reads a file."""

MODEL = """
from collections import OrderedDict
from types import SimpleNamespace as GPTConfig

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.p = c.n_head, c.dropout
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, None, self.p if self.training else 0.0, is_causal=True)
        return F.dropout(self.c_proj(y.transpose(1, 2).flatten(-2)), self.p, self.training)


def mlp(c):
    parts = {"c_fc": nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias), "gelu": nn.GELU()}
    parts |= {"c_proj": nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias), "dropout": nn.Dropout(c.dropout)}
    return nn.Sequential(OrderedDict(parts))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.n_embd, EPS, bias=c.bias), Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.n_embd, EPS, bias=c.bias), mlp(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        parts = {"wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd)}
        parts |= {"h": nn.ModuleList(Block(c) for _ in range(c.n_layer)), "ln_f": nn.LayerNorm(c.n_embd, EPS, bias=c.bias)}
        self.transformer, self.lm_head = nn.ModuleDict(parts), nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        print("number of parameters: few")

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1], device=idx.device))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        decay, rest = ([p for p in self.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False))
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""


def checkout(folder, replaced=None):
    """A folder with that file, some of its text replaced: {"old": "new"}."""
    text = MODEL
    for old, new in ({"EPS": "1e-5"} | (replaced or {})).items():
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(text, encoding="utf-8")
    return folder
