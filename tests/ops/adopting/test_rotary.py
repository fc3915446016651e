"""Rotary positions of queries and keys, and the norms before them, in one kernel, in attention of other libraries."""

import copy
import pickle
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from adoption.check import check_parity
from ops import replace_norms, replace_rotary, restore_rotary, rotary_qk_fn
from ops.adopting import attention
from ops.adopting.attention import AdoptedAttention

from .toys import classes

transformers = pytest.importorskip("transformers", minversion="5.20")
GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("device")  # runs where kernels run
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None,
    "bos_token_id": 1,
}  # fmt: skip
ALONE, NORMED = "rotary positions in one kernel", "rotary positions with q_norm and k_norm in one kernel"
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
FUSED: dict[str, tuple[str, dict]] = {
    "llama": (ALONE, {}),
    "qwen3": (NORMED, {}),
    "gemma3_text": (NORMED, {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo2": (ALONE, {}),  # its norms are of all heads together
    "phi": (ALONE, PARTIAL),  # slices off what is turned
    "glm": (ALONE, PARTIAL),  # interleaved
    "cohere": (ALONE, {}),  # interleaved, with each column of cos twice in a row
    "gpt_oss": (ALONE, {"num_local_experts": 2, "num_experts_per_tok": 1}),  # with each column once
}  # fmt: skip
LEFT: dict[str, tuple[str, dict]] = {
    "deepseek_v3": (
        "apply_rotary_pos_emb_interleave computes something else than rotary_qk_fn",
        {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
         "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v2": (
        "DeepseekV2RotaryEmbedding gives no pair of cos and sin",
        {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
         "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    ),
    "gptj": ("its forward takes no position_embeddings", {"rotary_dim": 4}),
}  # fmt: skip


def made(name: str) -> nn.Module:
    _, more = (FUSED | LEFT)[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **TINY | more)).eval()
    for p in model.parameters():  # a weight of 1 hides mistakes
        nn.init.normal_(p, std=0.3)
    return model.to("cuda" if GPU else "cpu")


@cache
def adopted(name: str) -> tuple[nn.Module, nn.Module, list[str]]:
    """The model with its norms replaced, a copy with rotary positions too, and what was done there."""
    plain = made(name)
    replace_norms(plain, verbose=False)
    model = copy.deepcopy(plain)
    return plain, model, sorted({what.partition(", ")[2] for _, what in replace_rotary(model)})


def results(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    """Logits and gradients, with positions as in packed documents and after a cache."""
    device = next(model.parameters()).device
    tokens = torch.arange(16, device=device).view(2, 8) * 3 % 61 + 2
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11, 12]], device=device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return [logits, *torch.autograd.grad(logits.float().sin().sum(), parameters, materialize_grads=True)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, of each tensor relative to its size or that of the gradients."""
    size = max(float(t.float().norm()) for t in expected[1:])
    return max(
        float((a - b).float().norm()) / max(float(b.float().norm()), 1e-3 * size) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", FUSED)
def test_a_model_computes_what_it_did_and_has_its_own_attention_again(name):
    plain, model, what = adopted(name)
    assert what == [FUSED[name][0]]
    turned = [type(module).__name__ for module in model.modules() if isinstance(module, AdoptedAttention)]
    assert len(turned) == 2 and classes(model) != classes(plain)
    found, expected = results(model), results(plain)
    assert distance(found, expected) < 1e-4
    # Rounded elsewhere: no farther from fp32 than attention's own in bf16 is.
    assert distance(results(model, autocast=True), expected) < 1.5 * distance(results(plain, autocast=True), expected)

    tokens = torch.arange(6).view(2, 3).to(expected[0].device) + 2
    how = {"max_new_tokens": 4, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    ours, own = (one.generate(tokens, attention_mask=torch.ones_like(tokens), **how) for one in (model, plain))
    torch.testing.assert_close(ours.scores, own.scores, rtol=1e-3, atol=1e-3)

    again = pickle.loads(pickle.dumps(model))  # a copy is made the same way
    assert classes(again) == classes(model) and all(map(torch.equal, results(again), found))
    restore_rotary(again)
    assert classes(again) == classes(plain) and all(map(torch.equal, results(again), expected))


@pytest.mark.parametrize("name", ["qwen3", "cohere"])
def test_one_kernel_runs_each_way(name, kernel):
    plain, model, _ = adopted(name)
    with mock.patch.object(attention, "rotary_qk_fn", wraps=attention.rotary_qk_fn) as called:
        assert distance(results(model), results(plain)) < 1e-4
    assert called.call_count == 2


@pytest.mark.parametrize("name", LEFT)
def test_what_turns_otherwise_is_left_alone_and_the_reason_is_said(name):
    model = made(name)
    (what,) = {what.partition(", ")[2] for _, what in replace_rotary(model)}
    assert what == f"rotary positions left alone: {LEFT[name][0]}" and classes(model) == classes(made(name))


@pytest.mark.parametrize(("name", "whole"), [("qwen3", True), ("glm", False)])
def test_it_compiles_into_one_graph(name, whole):
    plain, model, _ = adopted(name)
    tokens = torch.arange(16, device=next(model.parameters()).device).view(2, 8) + 2
    compiled, graphs = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    for layer in compiled.model.layers:
        (layer if whole else layer.self_attn).compile(backend=graphs, fullgraph=True)
    found, expected = (one(tokens, use_cache=False).logits.sin() for one in (compiled, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert graphs.frame_count == 1  # for all layers


# ---- attention of one's own -------------------------------------------------------------------------------------------------

D = 8


class Angles(nn.Module):
    def __init__(self, stretch: float = 1.0):
        super().__init__()
        self.stretch, self.frequencies = stretch, nn.Buffer(0.5 ** torch.arange(D // 2))

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.frequencies
        angles = torch.cat((angles, self.stretch * angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(t * cos + torch.cat((-t[..., D // 2 :], t[..., : D // 2]), dim=-1) * sin for t in (q, k))


class Attention(nn.Module):
    """Heads behind the tokens; and a normed query is used in other ways too."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.q_norm, self.k_norm = nn.Linear(16, 16), nn.Linear(16, D), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x, position_embeddings):
        normed = self.q_norm(self.q(x).unflatten(-1, (2, D)))
        q, k = apply_rotary(normed, self.k_norm(self.k(x).unflatten(-1, (1, D))), *position_embeddings, unsqueeze_dim=2)
        more = torch.cat((2.0 * normed[..., :4], normed.abs()[..., 4:]), dim=-1)
        return q - normed * k + normed.transpose(0, -1).transpose(-1, 0) / 2.0 + more * (-normed)


def own(function=apply_rotary, stretch: float = 1.0) -> nn.ModuleDict:
    """With another rotary function."""
    forward = Attention.forward
    forward = type(forward)(forward.__code__, {**globals(), "apply_rotary": function})
    torch.manual_seed(0)
    return nn.ModuleDict({"angles": Angles(stretch), "attention": type("Attention", (Attention,), {"forward": forward})()})


def run(model: nn.ModuleDict, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    leaves = [t for t in (x.clone().requires_grad_(), cos, sin, *model.parameters()) if t.requires_grad]
    y = model["attention"](leaves[0], (cos, sin))
    return [y, *torch.autograd.grad(y.sin().sum(), leaves)]


TURNS = {
    "backwards": lambda q, k, cos, sin, unsqueeze_dim: apply_rotary(q, k, cos, -sin, unsqueeze_dim),
    "a scale": lambda q, k, cos, sin, unsqueeze_dim: apply_rotary(1.01 * q, k, cos, sin, unsqueeze_dim),
    "half a gradient": lambda q, k, *rest, **how: apply_rotary(q, 0.5 * k + 0.5 * k.detach(), *rest, **how),
    "fp32": lambda q, k, cos, sin, unsqueeze_dim: apply_rotary(q.float(), k.float(), cos, sin, unsqueeze_dim),
}


@pytest.mark.parametrize("turn", [*TURNS, "halves of cos differ"])
def test_a_function_that_does_anything_else_is_left_alone(turn):
    model = own(TURNS[turn]) if turn in TURNS else own(stretch=2.0)
    replace_norms(model, verbose=False)
    ((name, what),) = replace_rotary(model)
    assert (name, type(model["attention"]).__mro__[1]) == ("attention", Attention)
    assert what.endswith("left alone: apply_rotary computes something else than rotary_qk_fn")


def test_whatever_else_is_done_to_normed_queries_and_whatever_angles_are_given_it_computes_the_same():
    plain = own()
    replace_norms(plain, verbose=False)
    model = copy.deepcopy(plain)
    assert replace_rotary(model) == [("attention", "Attention, rotary positions with q_norm and k_norm in one kernel")]
    x, angles = torch.randn(2, 5, 16), torch.rand(2, 5, D // 2).repeat(1, 1, 2)
    given = {
        "of each token": ((x, angles.cos(), angles.sin()), 1),
        "shared": ((x, angles[:1].cos(), angles[:1].sin()), 1),
        "one for all tokens": ((x, angles[:, :1].cos(), angles[:, :1].sin()), 0),
        "that are learned": ((x, angles.cos().requires_grad_(), angles.sin().requires_grad_()), 0),
        "fp32 beside bf16": ((x.bfloat16(), angles.cos(), angles.sin()), 0),
    }
    for name, (tensors, kernels_run) in given.items():
        for one in (plain, model):
            one.to(tensors[0].dtype)
        with mock.patch.object(attention, "rotary_qk_fn", wraps=attention.rotary_qk_fn) as called:
            found = run(model, *tensors)
        assert called.call_count == kernels_run, name
        tolerance = 0.1 if tensors[0].dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(found, run(plain, *tensors), rtol=tolerance, atol=tolerance)
    plain = own().double()  # which no kernel takes
    model = copy.deepcopy(plain)
    replace_rotary(model)
    given = x.double(), angles.cos().double(), angles.sin().double()
    assert all(map(torch.equal, run(model, *given), run(plain, *given)))


def test_check_parity_looks_at_what_runs():
    model, (_, ours, _) = made("qwen3"), adopted("qwen3")
    batch = {"input_ids": torch.arange(16, device=next(model.parameters()).device).view(2, 8) + 2, "use_cache": False}
    assert (check := check_parity(model, ours, batch)).holds, check
    assert "row scale of model.layers.0.input_layernorm" in {row.name for row in check.rows}

    def wrong(q, k, cos, sin, **how):
        return rotary_qk_fn(q, k, cos, sin, **how | {"eps": 1e-3})

    with mock.patch.object(attention, "rotary_qk_fn", wrong):
        assert not check_parity(model, ours, batch).holds


# ---- hooks ------------------------------------------------------------------------------------------------------------------


def test_norms_that_anything_hooks_are_called():
    plain, model, _ = adopted("qwen3")
    plain, model = copy.deepcopy(plain), copy.deepcopy(model)
    norms = [one.model.layers[0].self_attn.k_norm for one in (plain, model)]
    seen: list[Tensor] = []
    kinds = {
        "forward": lambda norm: norm.register_forward_hook(lambda module, args, y: seen.append(y) or 2.0 * y),
        "forward_pre": lambda norm: norm.register_forward_pre_hook(
            lambda module, args: (seen.append(args[0]) or args[0] + 1.0,)
        ),
        "full_backward": lambda norm: norm.register_full_backward_hook(
            lambda module, dx, dy: seen.append(dy[0]) or (3.0 * dx[0],)
        ),
        "all modules": lambda norm: torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, y: 2.0 * (seen.append(y) or y) if module is norm else None
        ),
    }
    before = results(model)
    for kind, register in kinds.items():
        seen.clear()
        found = []
        for one, norm in ((plain, norms[0]), (model, norms[1])):
            handle = register(norm)
            found.append(results(one))
            handle.remove()
        assert len(seen) == 2 and all(type(t) is Tensor for t in seen), kind
        torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-4)
        assert distance(found[1], found[0]) < 1e-4 and distance(found[1], before) > 1e-2, kind
    assert all(map(torch.equal, results(model), before))
