"""Runs that follow each other in one engine, with any optimizer."""

import copy

import pytest
import torch

from configs import ConfigError
from study.engine import refuse_outside_graph, reset

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Muon": lambda p: torch.optim.Muon(p, lr=1e-2),
}


class Counting(torch.optim.SGD):
    """Keeps a number in its state, and divides by it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                p.data.sub_(group["lr"] / state["steps"] * p.grad)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Counting"])
def test_after_a_reset_an_optimizer_does_what_it_did_at_first(name):
    weight = torch.nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    start, data = weight.detach().clone(), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    optimizer = OPTIMIZERS[name]([weight]) if name in OPTIMIZERS else Counting([weight], lr=1e-2)
    ends, places = [], []
    for _ in range(2):
        with torch.no_grad():
            weight.copy_(start)
        reset(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            (data @ weight.T).square().sum().backward()
            optimizer.step()
        ends.append(weight.detach().clone())
        places.append([v.data_ptr() for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)])
    assert torch.equal(*ends) and not torch.equal(ends[0], start)
    assert places[0] == places[1], "a graph holds the addresses"


def test_an_optimizer_that_counts_on_the_host_is_refused_where_there_is_a_graph():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    for optimizer, refused in ((OPTIMIZERS["SGD"]([weight]), False), (Counting([weight], lr=1e-2), True)):
        optimizer.step()
        if refused:
            with pytest.raises(ConfigError, match=r"Counting keeps steps on the host.*train\.py -m"):
                refuse_outside_graph(optimizer, torch.device("cpu"))
        else:
            refuse_outside_graph(optimizer, torch.device("cpu"))


@pytest.mark.gpu
def test_a_step_that_reads_a_value_on_the_host_is_refused_in_words(tiny, monkeypatch):
    from data import load_corpus
    from study.engine import Engine
    from tests.runs import composed, precision

    cfg = copy.deepcopy(composed([*tiny, "norm.kind=rmsnorm"]))
    corpus = load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)
    on_gpu = precision(torch.bfloat16).__class__(torch.device("cuda", 0), torch.bfloat16)
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *of: torch.tensor(clip(*of).item()).cuda())
    with pytest.raises(ConfigError, match="can't be captured"):
        Engine(cfg, on_gpu, corpus)
