"""Adopted models under torch.compile: one graph where the model alone makes one, and blocks that share theirs."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from ops import adopt

from .test_modulated import DiT
from .toys import N

DEPTH = 10  # more blocks than Dynamo compiles one function anew for


class Breaking(nn.Module):
    """A block whose graph breaks in one place, or nowhere."""

    def __init__(self, where):
        super().__init__()
        self.where, self.n1, self.n2 = where, nn.LayerNorm(N), nn.LayerNorm(N)
        self.attn, self.mlp = nn.Linear(N, N), nn.Linear(N, N)

    def forward(self, x):
        x = self.at(2, x + self.at(1, self.attn(self.at(0, self.n1(x)))))
        return x + self.mlp(self.at(3, self.n2(x)))

    def at(self, place, x):
        if place == self.where:
            torch._dynamo.graph_break()
        return x


def models(where, depth, device):
    torch.manual_seed(0)
    model = nn.Sequential(*(Breaking(where) for _ in range(depth))).to(device)
    adopted = copy.deepcopy(model)
    assert len(adopt(adopted, verbose=False).blocks) == depth
    return model, adopted


@pytest.mark.parametrize(("where", "whole"), [(None, False), (0, False), (1, True), (2, False), (3, True)])
def test_as_many_graphs_serve_all_adopted_blocks_as_serve_those_of_the_model_with_their_gradients(where, whole, device):
    x, counts, gradients = torch.randn(2, 5, N, device=device, requires_grad=True), [], []
    for model in models(where, DEPTH, device):
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        for one in (model,) if whole else model:
            one.compile(backend=graphs)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            gradients.append(torch.autograd.grad(model(x).sin().sum(), [*model.parameters()]))
        counts.append(graphs.frame_count)
    assert counts[0] == counts[1]
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)  # of ten blocks


def test_norms_and_sums_are_kernels_in_a_graph_too(device, kernel):
    torch._dynamo.reset()
    graphs, (_, adopted) = CompileCounterWithBackend("eager"), models(None, 1, device)
    adopted.compile(backend=graphs, fullgraph=True)
    adopted(torch.randn(2, 5, N, device=device, requires_grad=True))
    (graph,) = graphs.graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("prenorm" in str(target) for target in called) == 2 and not any("layer_norm" in str(target) for target in called)


def test_one_graph_serves_all_conditioned_blocks(device):
    torch._dynamo.reset()
    graphs, blocks = CompileCounterWithBackend("aot_eager"), nn.ModuleList(DiT() for _ in range(3)).to(device)
    x, c = (torch.randn(*shape, N, device=device, requires_grad=True) for shape in ((2, 5), (2,)))
    plain = copy.deepcopy(blocks)
    adopt(blocks, verbose=False)
    for block, own in zip(blocks, plain, strict=True):
        block.compile(backend=graphs, fullgraph=True)
        torch.testing.assert_close(block(x, c), own(x, c), rtol=1e-4, atol=1e-5)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma3"])
def test_a_whole_model_of_transformers_trains_in_one_graph(kind, device):
    transformers = pytest.importorskip("transformers", minversion="5.20")
    sizes = {
        "hidden_size": N,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    torch.manual_seed(0)
    plain = getattr(transformers, f"{kind}ForCausalLM")(config(**sizes)).to(device)
    model, tokens = copy.deepcopy(plain), torch.arange(16, device=device).view(2, 8)
    adoption = adopt(model, verbose=False)
    assert len(adoption.blocks) == len(adoption.rotary) == len(adoption.mlps) == 2 and adoption.loss
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    for one in (model, plain):
        one(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)


def test_dynamo_counts_the_graphs_of_each_adopted_class_apart():
    """Up to its limit, which would else be one for all blocks of all models in a process."""
    blocks = [type(f"Block{i}", (Breaking,), {})(None) for i in range(2)]
    adopt(nn.ModuleList(blocks), verbose=False)
    assert blocks[0].forward.__code__ is not blocks[1].forward.__code__
