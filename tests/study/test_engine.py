"""Runs that follow each other in one engine, with any optimizer."""

import pytest
import torch

from configs import ConfigError
from configs.schema import OptimKind
from data import load_corpus
from study.engine import Engine, initial_values, refuse_outside_graph, reset, windows_of
from tests.runs import composed
from training.precision import Precision

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


@pytest.fixture
def on_gpu(tiny):
    """(a config, the precision, the corpus) of a tiny run on the GPU."""
    cfg = composed([*tiny, "norm.kind=rmsnorm"])
    gpu = Precision(torch.device("cuda", 0), torch.bfloat16)
    return cfg, gpu, load_corpus(cfg.data, cfg.tokenizer, context=cfg.model.context)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(OptimKind))
def test_a_run_of_replays_is_that_of_the_same_steps_without_a_graph(on_gpu, kind):
    cfg, gpu, corpus = on_gpu
    cfg.optim.kind = kind
    engine = Engine(cfg, gpu, corpus)
    found = []
    for _ in range(3):
        engine.begin(cfg, initial_values(cfg, gpu, corpus), windows_of(cfg, corpus, gpu.device))
        engine.advance(10)
        found.append(engine.losses[:10].tolist())
        if len(found) == 2:
            engine._graph = None
    replayed, again, eager = found
    assert replayed[-1] < replayed[0]
    assert again == pytest.approx(replayed, rel=1e-3) and eager == pytest.approx(replayed, rel=1e-3)


@pytest.mark.gpu
def test_a_step_that_reads_a_value_on_the_host_is_refused_in_words(on_gpu, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *of: torch.tensor(clip(*of).item()).cuda())
    with pytest.raises(ConfigError, match="can't be captured"):
        Engine(*on_gpu)
