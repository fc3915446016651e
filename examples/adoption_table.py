"""Which models of other libraries `adopt` fuses, found by adopting tiny random ones: the table of docs/adopted_models.md.

    python examples/adoption_table.py                         # transformers, and timm and diffusers where they are installed
    python examples/adoption_table.py llama timm/vit_tiny_patch16_224     # these alone

Each model computes its output and its gradients before and after, in fp32, and then takes a step in training mode.
"""

import copy
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/adoption_table.py`

from ops import Adoption, adopt

TRANSFORMERS = """
apertus arcee aria_text audio-spectrogram-transformer bamba bart beit bert biogpt bitnet blenderbot bloom camembert chameleon
clip_text_model clip_vision_model codegen cohere cohere2 convnextv2 ctrl dbrx deberta-v2 deepseek_v2 deepseek_v3 deit dinov2
distilbert doge dots1 electra ernie4_5 ernie4_5_moe esm exaone4 falcon falcon_h1 falcon_mamba flaubert gemma gemma2 gemma3_text
glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoeshared helium hubert
hunyuan_v1_dense ijepa jamba jetmoe lfm2 llama llama4_text longformer longt5 m2m_100 mamba mamba2 marian mbart minimax ministral
mistral mixtral modernbert mpnet mpt mt5 nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi phi3 phimoe plbart
qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text recurrent_gemma roberta roformer seed_oss siglip_vision_model smollm3
stablelm starcoder2 swin switch_transformers t5 umt5 vaultgemma vit vit_mae vit_msn vitdet wav2vec2 whisper xglm xlm-roberta
xlnet yolos zamba2
""".split()
TIMM = """
vit_tiny_patch16_224 vit_small_patch14_dinov2 deit3_small_patch16_224 beit_base_patch16_224 eva02_tiny_patch14_224
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 convnext_atto convnextv2_atto mixer_s32_224 cait_xxs24_224
xcit_nano_12_p16_224 maxvit_rmlp_pico_rw_256 vit_base_patch16_clip_224 vit_base_patch16_siglip_224 twins_svt_small pvt_v2_b0
davit_tiny naflexvit_base_patch16_gap vit_relpos_small_patch16_224 resmlp_12_224 gmixer_24_224
""".split()
TINY = {  # by the name of a configuration's field
    "vocab_size": 96, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "emb_dim": 32, "num_hidden_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "moe_intermediate_size": 32, "d_ff": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "ffn_dim": 64,
    "head_dim": 8, "d_kv": 8, "d_head": 8, "d_inner": 64, "hidden_dim": 64, "num_decoder_layers": 2, "n_inner": 64, "word_embed_proj_dim": 32,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "image_size": 32, "patch_size": 8, "ffn_hidden_size": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "embedding_size": 32, "projection_dim": 32, "shared_expert_intermediate_size": 32,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1, "state_size": 8, "n_mamba_heads": 2, "lru_width": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64, "max_length": 32, "rotary_dim": 8, "sliding_window": 16, "attention_window": 8,
    "layerdrop": 0.1, "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1, "moe_layers": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 64,
    "block_size": 4, "time_step_rank": 4, "expert_intermediate_size": 32, "shared_intermediate_size": 32, "rope_theta": 10000.0, "chunk_size": 8, "num_memory_blocks": 1,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2,
    "depths": [2, 2], "hidden_sizes": [16, 32], "num_stages": 2, "window_size": 2, "max_seq_len": 64,
}  # fmt: skip


OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": 4}, "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hubert": {"num_feat_extract_layers": 2, "conv_bias": True}, "swin": {"embed_dim": 32, "num_heads": [2, 4]},
}  # fmt: skip
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DConditionModel": (
        {"block_out_channels": (32, 32), "layers_per_block": 1, "cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 2]), "encoder_hidden_states": torch.randn(2, 5, 32)},
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, "sample_size": 8},
        {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([1, 2])},
    ),
    "HunyuanDiT2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8, "hidden_size": 16,
         "cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 16, "text_len": 4, "text_len_t5": 4},
        {},
    ),
}  # fmt: skip


@dataclass
class Row:
    """One model of the table."""

    name: str
    norms: str  # replaced, of all
    fused: str
    parity: str

    @property
    def is_fused(self) -> bool:
        return self.parity == "yes" and self.fused[:1].isdigit()


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, build in _builders(names):
        torch.manual_seed(0)
        try:
            model, batch = build(name.rpartition("/")[2])
            expected = _results(_shaken(model.eval()), batch)
        except Exception as error:  # a tiny configuration of it needs more care than this script takes
            print(f"{name:40} not tried: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
            continue
        rows.append(_row(name, model, batch, expected))
        print(f"{rows[-1].name:40} {rows[-1].norms:10} {rows[-1].fused:60} {rows[-1].parity}", flush=True)
    good = sum(row.is_fused for row in rows)
    print(f"\n{good} of {len(rows)} models have fused sums and parity")
    if not names:
        lines = [f"| {row.name} | {row.norms} | {row.fused} | {row.parity} |" for row in rows]
        TABLE.write_text(
            f"{HEAD}{good} of {len(rows)} models have fused sums.\n\n| model | norms replaced | one kernel each | parity |\n|---|---|---|---|\n"
            + "\n".join(lines)
            + "\n"
        )


TABLE = Path(__file__).parents[1] / "docs" / "adopted_models.md"
HEAD = """# What `adopt` fuses, model by model

Written by `python examples/adoption_table.py`, which adopts tiny models with random weights in one call each, without a layout.
"Adds" are residual sums that a norm computes along in its kernel; "sums" are residual sums that are one kernel together with the
norm, scale or dropout of their branch. Parity: the outputs and all gradients in fp32 before and after, and a step in training.

"""


def _builders(names: list[str]) -> Iterator[tuple[str, Any]]:
    known = {name: _of_transformers for name in TRANSFORMERS}
    known |= {f"timm/{name}": _of_timm for name in TIMM} if importlib.util.find_spec("timm") else {}
    known |= {f"diffusers/{name}": _of_diffusers for name in DIFFUSERS} if importlib.util.find_spec("diffusers") else {}
    for name in names or known:
        yield name, known.get(name, _of_transformers)


def _of_timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, (torch.randn(2, *model.default_cfg["input_size"]),)


def _of_diffusers(name: str) -> tuple[nn.Module, Any]:
    import diffusers

    config, batch = DIFFUSERS[name]
    return getattr(diffusers, name)(**config), batch


def _of_transformers(name: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = CONFIG_MAPPING[name]
    default = kind()
    fields = {field for field in dir(default) if not isinstance(getattr(kind, field, None), property)}
    fields -= kind.attribute_map.keys() & set(LAYER_KINDS)
    given = {field: value for field, value in TINY.items() if field in fields and _is_like(getattr(default, field), value)}
    for field in set(LAYER_KINDS) & fields:
        if isinstance(kinds := getattr(default, field), list):
            given[field] = (list(dict.fromkeys(kinds)) * 2)[: max(2, len(set(kinds)))]
            given["num_hidden_layers"] = len(given[field])
    config = kind(**(given | OVERRIDES.get(name, {})))
    causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not config.is_encoder_decoder and name not in ENCODERS
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    return model, _batch(model, config)


ENCODERS = {"bert", "roberta", "electra", "camembert", "xlm-roberta", "roformer"}
LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")


def _is_like(default: Any, value: Any) -> bool:
    return isinstance(default, type(value) | type(None)) or (isinstance(value, list) and isinstance(default, tuple))


def _batch(model: nn.Module, config: Any) -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12) + 3
    size = getattr(config, "image_size", 32)
    inputs = {
        "pixel_values": lambda: torch.randn(
            2, getattr(config, "num_channels", 3), *([size] * 2 if isinstance(size, int) else size)
        ),
        "input_features": lambda: torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions),
        "input_values": lambda: (
            torch.randn(2, config.max_length, config.num_mel_bins) if hasattr(config, "num_mel_bins") else torch.randn(2, 800)
        ),
    }
    kind = getattr(model, "main_input_name", "input_ids")
    batch = {kind: inputs[kind]()} if kind in inputs else {"input_ids": tokens}
    return batch | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})


def _shaken(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # initial scales of 1e-5 and weights of 1 would hide a mistake
            p += 0.05 * torch.randn(p.shape, generator=generator)
    return model


def _row(name: str, model: nn.Module, batch: Any, expected: dict[str, Tensor]) -> Row:
    adopted = copy.deepcopy(model)
    try:
        found = adopt(adopted, verbose=False)
        parity = _compared(expected, _results(adopted, batch))
        model.train()
        try:
            _results(model, batch)
        except Exception:  # it has no training mode, whoever computes it
            pass
        else:
            _results(adopted.train(), batch)
    except Exception as error:
        traceback.print_exc()
        return Row(name, "", "", f"no: {type(error).__name__}: {str(error)[:200]}")
    return Row(name, f"{sum(site.fused for site in found.norms)} of {len(found.norms)}", _fused(found), parity)


def _fused(found: Adoption) -> str:
    trials = found.blocks.values()
    adds, sums = sum(len(trial.norms) for trial in trials), sum(len(trial.sums) for trial in trials)
    features = dict.fromkeys(f for trial in trials for norm in (*trial.norms.values(), *trial.sums) for f in norm)
    counts = ", ".join(f"{count} {what}" for count, what in ((adds, "adds"), (sums, "sums")) if count) or "none"
    why = f"; {len(found.left)} blocks left: {next(iter(found.left.values()))}" if found.left else ""
    return counts + (f", with {', '.join(features)}" if features else "") + why


def _results(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    torch.manual_seed(1)
    model.zero_grad()
    output = model(*batch) if isinstance(batch, tuple) else model(**batch)
    leaves = tree_leaves(output if isinstance(output, tuple | list | Tensor) else dict(output))
    tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    value = sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in tensors if t.requires_grad)
    value.backward()  # type: ignore[union-attr]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {f"output {i} of {len(leaves)}": t.detach() for i, t in enumerate(tensors)} | gradients


def _compared(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    if expected.keys() != found.keys():
        return f"no: {', '.join(sorted(expected.keys() ^ found.keys())[:3])} is there in one of them only"
    largest = max(float(g.norm()) for g in expected.values())
    for name, a in expected.items():
        error = float((found[name] - a).norm()) / max(float(a.norm()), 1e-4 * largest, 1e-12)
        if not error < 3e-3:
            return f"no: {name} differs by {error:.2g}"
    return "yes"


if __name__ == "__main__":
    main(sys.argv[1:])
