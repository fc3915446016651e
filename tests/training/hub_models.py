"""GPT-2 and Llama of `transformers`, small and with weights so large that a wrong layout shows."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.20")

V, W, C, LAYERS, HEADS = 70, 32, 16, 2, 4  # our vocabulary is padded to 128
GPT2 = [f"model.layers={LAYERS}", f"model.heads={HEADS}", f"model.width={W}", f"model.context={C}"]
LLAMA = [*GPT2, "model.kv_heads=2", "model.mlp_width=48", "model.bias=false", "model.positions=rotary"]
LLAMA += ["model.rotary_base=500.0", "model.activation=swiglu", "norm.kind=rmsnorm", "norm.eps=1e-6"]


def gpt2():
    return _random(transformers.GPT2Config(vocab_size=V, n_layer=LAYERS, n_head=HEADS, n_embd=W, n_positions=C))


def llama():
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": C}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    more = {"intermediate_size": 48, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_parameters": rope}
    return _random(transformers.LlamaConfig(vocab_size=V, hidden_size=W, **sizes, **more))


def logits(model, tokens):
    with torch.no_grad():
        found = model.eval()(tokens)
    return getattr(found, "logits", found)


def _random(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or ("ln_" in name and name.endswith("weight"))
            parameter.copy_(is_norm + 0.2 * torch.randn_like(parameter))
    return model
