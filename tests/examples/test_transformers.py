"""Fused blocks inside transformers' own loops; in graphs: tests/ops/adopting/test_compiled.py."""

import copy

import pytest
import torch

from ops import adopt, restore_loss, restore_mlps, restore_norms, restore_rotary

transformers = pytest.importorskip("transformers", minversion="5.20")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "gpt2": (transformers.GPT2Config, SIZES),
    "llama": (transformers.LlamaConfig, WIDE),
    "gemma2": (transformers.Gemma2Config, WIDE),
    "olmo2": (transformers.Olmo2Config, WIDE),
}
TOKENS = torch.arange(20).view(2, 10)


def build(config, sizes, **more):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes | more)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(params=MODELS)
def pair(request):
    """A model as it was, and one whose norms are replaced and whose blocks are fused."""
    fused = copy.deepcopy(model := build(*MODELS[request.param]))
    found = adopt(fused, verbose=False)
    assert all(site.fused for site in found.norms) and len(found.blocks) == 2 and not found.left
    return model, fused


def gradients(model):
    torch.manual_seed(1)
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    model.zero_grad()
    loss.backward()  # reentrant checkpointing goes with this alone
    return [p.grad.clone() for p in model.parameters()]


def test_gradients_and_generated_tokens_are_those_of_the_model_and_restoring_gives_it_back(pair):
    model, fused = pair
    torch.testing.assert_close(gradients(fused), gradients(model), rtol=1e-3, atol=1e-5)
    texts = [one.generate(TOKENS[:, :4], max_new_tokens=6, do_sample=False, pad_token_id=0) for one in pair]
    assert torch.equal(*texts)
    restore_rotary(fused)
    restore_mlps(fused)
    restore_norms(fused, verbose=False)
    restore_loss(fused, verbose=False)
    assert [type(module) for module in fused.modules()] == [type(module) for module in model.modules()]
    assert torch.equal(fused(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_attentions_and_hidden_states_are_those_of_the_model_and_checkpointing_changes_no_gradient(pair):
    for one in pair:
        one.set_attn_implementation("eager")
    model, fused = (one(input_ids=TOKENS, output_attentions=True, output_hidden_states=True) for one in pair)
    assert all(type(state) is torch.Tensor for state in fused.hidden_states)
    torch.testing.assert_close(fused.attentions, model.attentions)
    torch.testing.assert_close(fused.hidden_states, model.hidden_states)
    _, fused = pair
    fused.config.attention_dropout = fused.config.attn_pdrop = 0.0
    fused.train()
    for reentrant in (False, True):
        if reentrant:  # its blocks take and give tensors, whose dropouts are torch's
            for module in fused.modules():
                module.p = 0.0
        fused.gradient_checkpointing_disable()
        plain = gradients(fused)
        fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.testing.assert_close(gradients(fused), plain)
