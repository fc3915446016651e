"""Which models of other libraries `adopt` fuses, found by adopting tiny random ones: the table of docs/adopted_models.md.

    python examples/adoption_table.py                         # transformers, and timm and diffusers where they are installed
    python examples/adoption_table.py llama timm/vit_tiny_patch16_224     # these alone

Each model computes its output and its gradients before and after, in fp32, and then takes a step in training mode.
"""

import copy
import sys
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


@dataclass
class Row:
    name: str
    fused: str  # norms that compute a sum along
    norms: str  # replaced, of all
    verdict: str


def main(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, model, batch in _models(names):
        row = _row(name, model, batch)
        rows.append(row)
        print(f"{row.name:36} {row.norms:12} {row.fused:60} {row.verdict}", flush=True)
    good = sum(row.verdict == "yes" and row.fused != "none" for row in rows)
    print(f"\n{good} of {len(rows)} have fused sums and parity")


def _models(names: list[str]) -> Iterator[tuple[str, nn.Module, Any]]:
    for name in names or [*TRANSFORMERS, *(f"timm/{name}" for name in TIMM)]:
        torch.manual_seed(0)
        try:
            yield (name, *(_of_timm(name) if name.startswith("timm/") else _of_transformers(name)))
        except Exception as error:
            print(f"{name:36} not built: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)


def _of_timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name.removeprefix("timm/"), pretrained=False)
    return model, (torch.randn(2, *model.default_cfg["input_size"]),)


def _of_transformers(name: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = CONFIG_MAPPING[name]
    config = kind()
    given = {field: value for field, value in TINY.items() if hasattr(config, field) and not isinstance(getattr(kind, field, None), property) and isinstance(getattr(config, field), type(value) | type(None))}
    for field in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "attn_layer_indices"):
        if isinstance(getattr(config, field, None), list) and not isinstance(getattr(kind, field, None), property):
            present = list(dict.fromkeys(getattr(config, field)))
            given[field] = (present * 4)[: max(2, len(present))]
            for depth in ("num_hidden_layers",):
                given[depth] = len(given[field])
    given |= OVERRIDES.get(name, {})
    config = kind(**given)
    causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(config, "is_encoder_decoder", False) and name not in ENCODERS
    model = (AutoModelForCausalLM if causal else AutoModel).from_config(config)
    return model, _batch(model, config)


ENCODERS = {"bert", "roberta", "electra", "camembert", "xlm-roberta", "roformer"}
OVERRIDES: dict[str, dict[str, Any]] = {}


def _batch(model: nn.Module, config: Any) -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12) + 3
    batch: dict[str, Any] = {}
    kind = getattr(model, "main_input_name", "input_ids")
    if kind == "pixel_values":
        size = config.image_size if isinstance(getattr(config, "image_size", 32), int) else config.image_size[0]
        batch["pixel_values"] = torch.randn(2, getattr(config, "num_channels", 3), size, size)
    elif kind == "input_features":
        batch["input_features"] = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
    elif kind == "input_values":
        batch["input_values"] = torch.randn(2, config.max_length, config.num_mel_bins) if hasattr(config, "max_length") and hasattr(config, "num_mel_bins") else torch.randn(2, 800)
    else:
        batch["input_ids"] = tokens
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = tokens
    return batch


def _row(name: str, model: nn.Module, batch: Any) -> Row:
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # initial scales of 1e-5 and weights of 1 would hide a mistake
            p += 0.05 * torch.randn(p.shape, generator=generator)
    try:
        expected = _results(model, batch)
    except Exception as error:
        return Row(name, "", "", f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}")
    own, adopted = model, copy.deepcopy(model)
    try:
        found = adopt(adopted, verbose=False)
        verdict = _compare(expected, _results(adopted, batch))
    except Exception as error:
        import traceback; traceback.print_exc(limit=-4)
        return Row(name, "", "", f"RAISES {type(error).__name__}: {str(error)[:200]}")
    try:
        _results(own.train(), batch)
    except Exception:
        pass
    else:
        try:
            _results(adopted.train(), batch)
        except Exception as error:
            import traceback; traceback.print_exc(limit=-4)
            verdict = f"RAISES in training {type(error).__name__}: {str(error)[:200]}"
    return Row(name, _fused(found), f"{sum(site.fused for site in found.norms)} of {len(found.norms)}", verdict)


def _fused(found: Adoption) -> str:
    features: dict[str, int] = {}
    count = 0
    for trial in found.blocks.values():
        count += len(trial.norms)
        for norm in (*trial.norms.values(), *trial.sums):
            for feature in norm:
                features[feature] = features.get(feature, 0) + 1
    sums = sum(len(trial.sums) for trial in found.blocks.values())
    left = f"; {len(found.left)} blocks left: {next(iter(found.left.values()))[:120]}" if found.left else ""
    what = f"{count} adds" + (f", {sums} sums" if sums else "") + (f" with {', '.join(features)}" if features else "") if count or sums else "none"
    return what + left


def _results(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    output = model(*batch) if isinstance(batch, tuple) else model(**batch)
    tensors = [t for t in tree_leaves(output if isinstance(output, tuple | list | Tensor) else dict(output)) if isinstance(t, Tensor) and t.is_floating_point()]
    assert all(isinstance(t, Tensor) for t in tree_leaves(output if isinstance(output, tuple | list | Tensor) else dict(output)) if "Pending" in type(t).__name__ or "Branch" in type(t).__name__)
    sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in tensors if t.requires_grad).backward()
    return {f"output {i}": t.detach() for i, t in enumerate(tensors)} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def _compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    if expected.keys() != found.keys():
        return f"DIFFERS in what has a gradient: {sorted(expected.keys() ^ found.keys())[:3]}"
    largest = max(float(g.norm()) for g in expected.values())
    for name, a in expected.items():
        error = float((found[name] - a).norm()) / max(float(a.norm()), 1e-4 * largest, 1e-12)
        if not error < 3e-3:
            return f"DIFFERS in {name}: {error:.2g}"
    return "yes"


if __name__ == "__main__":
    main(sys.argv[1:])
