"""Loss, initial values, seeds and samples of a GPT; its logits: test_block.py, and tests/training/test_export.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from configs.schema import ModelConfig, NormConfig
from model import GPT

LLAMA = {"positions": "rotary", "activation": "swiglu", "kv_heads": 2, "qk_norm": True, "bias": False, "norm_kind": "rmsnorm"}


def test_loss_is_the_cross_entropy_of_the_logits_and_fp32_under_autocast(build, batch):
    tokens, targets = batch
    model = build()
    logits = model(tokens)
    torch.testing.assert_close(model(tokens, targets), F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(*batch).dtype == torch.float32 and model(tokens).dtype == torch.bfloat16


def test_initialisation_is_gpt2s():
    model = GPT(ModelConfig(layers=8, width=128, tie_embeddings=False, block="parallel"), NormConfig(), 512)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name  # 16384 draws or more: standard error 0.6 %
            assert parameter.mean().item() == pytest.approx(0, abs=0.05 * std), name


@pytest.mark.parametrize("tied", [True, False])
def test_with_unit_embeddings_the_stream_starts_at_one_and_all_else_as_before(tied):
    sizes = {"width": 256, "context": 16, "tie_embeddings": tied}
    torch.manual_seed(0)
    plain = GPT(ModelConfig(**sizes), NormConfig(), 512)
    torch.manual_seed(0)
    unit = GPT(ModelConfig(**sizes, embedding_scale="unit"), NormConfig(), 512)
    tokens = torch.arange(512).view(32, 16)
    assert unit.embed(tokens).square().mean().sqrt().item() == pytest.approx(1, rel=0.01)
    for (name, p), q in zip(plain.named_parameters(), unit.parameters(), strict=True):
        torch.testing.assert_close(q, p / (0.02 * 16) if name == "embedding.weight" else p, rtol=1e-6, atol=0)


def test_vocabulary_is_padded_or_as_given(build, batch):
    assert [build(vocab_size=given)(batch[0]).shape[-1] for given in (None, 60, 100)] == [64, 60, 100]
    with pytest.raises(ValueError, match=r"model\.vocab_size is 59, less than the tokenizer's 60"):
        build(vocab_size=59)


@pytest.mark.parametrize(
    ("method", "inputs", "message"),
    [
        ("forward", {"tokens": torch.zeros(1, 17, dtype=torch.int64)}, r"17 positions, and model\.context is 16"),
        ("forward", {"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds has shape \(3,\) .* expected int64 of shape \(5,\)"),
        ("generate", {"top_k": 0}, "top_k must be 1 or more, .* got 0"),
    ],
)
def test_inputs_that_do_not_fit_are_named(build, batch, method, inputs, message):
    more = {"new_tokens": 1} if method == "generate" else {}
    with pytest.raises(ValueError, match=message):
        getattr(build(), method)(**{"tokens": batch[0]} | more | inputs)


@pytest.mark.parametrize(
    ("options", "draws"),
    [({"dropout": 0.2}, True), *(({rate: 0.2, "norm_impl": "torch"}, True) for rate in ("dropout", "drop_path")), ({}, False)],
)
def test_seeds_left_out_are_drawn_from_torchs_generator_if_needed(build, batch, options, draws):
    model = build(**options, attention_dropout=0.0)
    torch.manual_seed(3)
    first, state = model(*batch).item(), torch.get_rng_state()
    second = model(*batch).item()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state) == (not draws)
    assert model(*batch).item() == first and (second != first) == draws


def test_generate_appends_to_the_prompt_beyond_the_context_in_evaluation_mode(build, batch):
    model, prompt, modes = build(dropout=0.5).train(), batch[0], []
    model.register_forward_hook(lambda module, inputs, output: modes.append((module.training, output.requires_grad)))
    tokens = model.generate(prompt, new_tokens=10, temperature=1.0, top_k=None)
    assert tokens.shape == (4, 22) and torch.equal(tokens[:, :12], prompt)  # the context is 16
    assert tokens.max() < 60  # never a padding token
    assert modes == [(False, False)] * 10 and model.training


def test_generate_follows_temperature_top_k_and_generator(build):
    model = build(tie_embeddings=False)
    nn.init.normal_(model.head.weight)
    prompt = torch.ones(500, 1, dtype=torch.int64)

    def sample(**options):
        return model.generate(prompt, 1, generator=torch.Generator().manual_seed(0), **options)[:, 1]

    best = model(prompt[:1])[0, -1, :60].topk(3).indices
    assert torch.equal(sample(temperature=1.0), sample(temperature=1.0))
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"temperature": 1e-42}):  # where logits / temperature would overflow
        assert set(sample(**greedy).tolist()) == {best[0].item()}
    assert set(sample(temperature=5.0, top_k=3).tolist()) == set(best.tolist())
    assert len(sample(temperature=1.0).unique()) > len(sample(temperature=0.2).unique())


def test_flops_of_gpt2():
    def flops(**options):
        with torch.device("meta"):
            sizes = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab_size": 50257}
            return GPT(ModelConfig(**sizes | options), NormConfig(), 50257).flops_per_token()

    attention = 12 * 12 * 768 * 1024
    assert flops() == 6 * (12 * 12 * 768**2 + 50257 * 768) + attention  # 4 + 8 width² a layer
    assert flops(tie_embeddings=False) == flops(positions="rotary") == flops(bias=False) == flops()
    assert flops(kv_heads=4) == flops() - 6 * 12 * 2 * 768 * 512
    assert flops(context=512) == flops() - attention / 2


def test_compiles_without_graph_breaks_and_with_the_same_loss(build, batch):
    model = build(**LLAMA, block="parallel", layers=1, dropout=0.1, attention_dropout=0.0, drop_path=0.3)
    seeds = torch.arange(model.dropout_sites)
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):  # a whole run that is compiled: tests/training/test_learning.py
        loss = torch.compile(model, backend="eager", fullgraph=True)(*batch, seeds)
        assert loss.item() == pytest.approx(model(*batch, seeds).item(), abs=1e-5)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
