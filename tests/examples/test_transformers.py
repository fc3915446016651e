"""Fused blocks inside transformers' own loops. Skipped where transformers is not installed."""

import copy

import pytest
import torch

from ops import GPT2_BLOCK, LLAMA_BLOCK, fuse_prenorm_block, replace_norms, restore_norms

transformers = pytest.importorskip("transformers", minversion="5.20")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "gpt2": (transformers.GPT2Config, SIZES, "transformer.h", GPT2_BLOCK),
    "llama": (transformers.LlamaConfig, WIDE, "model.layers", LLAMA_BLOCK),
    "mistral": (transformers.MistralConfig, WIDE, "model.layers", LLAMA_BLOCK),
    "qwen3": (transformers.Qwen3Config, WIDE, "model.layers", LLAMA_BLOCK),
    "gemma": (transformers.GemmaConfig, WIDE, "model.layers", LLAMA_BLOCK),
}
TOKENS = torch.arange(20).view(2, 10)


def build(config, sizes):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(params=MODELS)
def pair(request):
    """A model as it was, and one whose norms are replaced and whose blocks are fused."""
    config, sizes, blocks, layout = MODELS[request.param]
    fused = copy.deepcopy(model := build(config, sizes))
    assert all(site.fused for site in replace_norms(fused, verbose=False))
    fuse_prenorm_block(fused.get_submodule(blocks), layout)
    return model, fused


def gradients(model):
    torch.manual_seed(1)
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return torch.autograd.grad(loss, list(model.parameters()))


def test_gradients_and_generated_tokens_are_those_of_the_model_and_restoring_gives_it_back(pair):
    model, fused = pair
    torch.testing.assert_close(gradients(fused), gradients(model), rtol=1e-3, atol=1e-5)
    texts = [one.generate(TOKENS[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0) for one in pair]
    assert torch.equal(*texts)
    restore_norms(fused, verbose=False)
    assert [type(module) for module in fused.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(fused(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_attentions_are_those_of_the_model_hidden_states_are_refused_and_checkpointing_changes_no_gradient(pair):
    for one in pair:
        one.set_attn_implementation("eager")
    torch.testing.assert_close(*(one(input_ids=TOKENS, output_attentions=True).attentions for one in pair))
    _, fused = pair
    with pytest.raises(TypeError, match="output_hidden_states needs blocks that are not fused"):
        fused(input_ids=TOKENS, output_hidden_states=True)
    fused.config.attention_dropout = fused.config.attn_pdrop = 0.0
    plain = gradients(fused.train())
    fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(gradients(fused), plain)


def test_a_block_that_scales_its_branches_is_refused():
    model = build(transformers.GraniteConfig, {**WIDE, "residual_multiplier": 0.3})
    with pytest.raises(ValueError, match=r"does not compute x \+ mixer"):
        fuse_prenorm_block(model.model.layers[0], LLAMA_BLOCK)
