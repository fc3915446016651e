"""GPT-2 and Llama as `transformers` computes them: the published formulae, on tensors by their names on the Hub.

Nothing of this project is used: Radford et al. (2019) with the tanh GELU; Touvron et al. (arXiv:2302.13971) with rotary
positions that pair feature i with i + head_width / 2, and grouped queries (arXiv:2305.13245).
"""

import math

import torch

# (name, shape) of each tensor, with V = vocabulary, W = width, H = hidden features, C = context, K = width of keys and values
GPT2_TOP = {"wte.weight": "VW", "wpe.weight": "CW", "ln_f.weight": "W", "ln_f.bias": "W"}
GPT2_BLOCK = {
    "ln_1.weight": "W",
    "ln_1.bias": "W",
    "ln_2.weight": "W",
    "ln_2.bias": "W",
    "attn.c_attn.weight": "W3",
    "attn.c_attn.bias": "3",
    "attn.c_proj.weight": "WW",
    "attn.c_proj.bias": "W",
    "mlp.c_fc.weight": "WH",
    "mlp.c_fc.bias": "H",
    "mlp.c_proj.weight": "HW",
    "mlp.c_proj.bias": "W",
}
LLAMA_TOP = {"model.embed_tokens.weight": "VW", "model.norm.weight": "W"}
LLAMA_BLOCK = {
    "input_layernorm.weight": "W",
    "post_attention_layernorm.weight": "W",
    "self_attn.q_proj.weight": "WW",
    "self_attn.k_proj.weight": "KW",
    "self_attn.v_proj.weight": "KW",
    "self_attn.o_proj.weight": "WW",
    "mlp.gate_proj.weight": "HW",
    "mlp.up_proj.weight": "HW",
    "mlp.down_proj.weight": "WH",
}


def random_tensors(top, block, prefix, layers, sizes, seed=0):
    """A checkpoint of random weights, large enough that a wrong layout shows."""
    generator = torch.Generator().manual_seed(seed)
    names = dict(top)
    for layer in range(layers):
        names |= {f"{prefix}.{layer}.{name}": shape for name, shape in block.items()}
    tensors = {}
    for name, shape in names.items():
        values = torch.randn([sizes[letter] for letter in shape], generator=generator)
        tensors[name] = 1 + 0.2 * values if "norm" in name or ("ln_" in name and name.endswith("weight")) else 0.2 * values
    return tensors


def gpt2(tensors, tokens, heads, eps=1e-5):
    """Logits [B, T, V] of tokens [B, T]. `tensors` by names without the prefix `transformer.`."""
    t = tensors
    B, T = tokens.shape
    x = t["wte.weight"][tokens] + t["wpe.weight"][:T]
    width = x.shape[-1]
    mask = torch.full((T, T), -math.inf).triu(1)

    def layer_norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * t[f"{name}.weight"] + t[f"{name}.bias"]

    def conv1d(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]  # [in, out]

    layer = 0
    while f"h.{layer}.ln_1.weight" in t:
        h = f"h.{layer}"
        q, k, v = conv1d(layer_norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(width, dim=-1)
        q, k, v = (part.view(B, T, heads, width // heads).transpose(1, 2) for part in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // heads) + mask, dim=-1)
        x = x + conv1d((weights @ v).transpose(1, 2).reshape(B, T, width), f"{h}.attn.c_proj")
        a = conv1d(layer_norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        a = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
        x = x + conv1d(a, f"{h}.mlp.c_proj")
        layer += 1
    return layer_norm(x, "ln_f") @ t.get("lm_head.weight", t["wte.weight"]).T


def llama(tensors, tokens, heads, kv_heads, eps, base):
    """Logits [B, T, V] of tokens [B, T]."""
    t = tensors
    B, T = tokens.shape
    x = t["model.embed_tokens.weight"][tokens]
    width = x.shape[-1]
    size = width // heads
    mask = torch.full((T, T), -math.inf).triu(1)
    angles = torch.arange(T)[:, None] / base ** (torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat((f, f), dim=-1) for f in (angles.cos(), angles.sin()))

    def rms_norm(x, name):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * t[name]

    def linear(x, name):
        y = x @ t[f"{name}.weight"].T
        return y + t[f"{name}.bias"] if f"{name}.bias" in t else y

    def rotated(x):
        turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), dim=-1)
        return x * cos + turned * sin

    layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in t:
        h = f"model.layers.{layer}"
        y = rms_norm(x, f"{h}.input_layernorm.weight")
        q, k, v = (linear(y, f"{h}.self_attn.{name}_proj").view(B, T, -1, size).transpose(1, 2) for name in ("q", "k", "v"))
        q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(size) + mask, dim=-1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(B, T, width), f"{h}.self_attn.o_proj")
        y = rms_norm(x, f"{h}.post_attention_layernorm.weight")
        gate = linear(y, f"{h}.mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(y, f"{h}.mlp.up_proj"), f"{h}.mlp.down_proj")
        layer += 1
    return rms_norm(x, "model.norm.weight") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T
