"""The layouts of GPT-2 and Llama on the Hugging Face Hub, and the export of a trained model in one of them.

python -m training.export runs/FOLDER --format gpt2        or llama; writes runs/FOLDER/export_gpt2

GPT-2 stores its linear weights as [in, out], the transpose of ours. Llama stores separately what we join in one product:
queries, keys and values, and the two halves of a SwiGLU. Llama's rotary pairs on the Hub are ours: feature i with
i + head_width / 2.
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from configs import Config, ConfigError, keys
from configs.schema import Activation, ModelConfig, NormKind, Positions
from data import Tokenizer
from model.gpt import embedding_rows
from model.mlp import mlp_width
from training import checkpoint, storage
from training.storage import StorageError, relative

GPT2, LLAMA = "gpt2", "llama"
FORMATS = (GPT2, LLAMA)

# ---- config.json -------------------------------------------------------------------------------------------------------------

KEYS: tuple[tuple[str, str, str], ...] = (  # ours, GPT-2's and Llama's
    ("model.layers", "n_layer", "num_hidden_layers"),
    ("model.heads", "n_head", "num_attention_heads"),
    ("model.kv_heads", "", "num_key_value_heads"),
    ("model.width", "n_embd", "hidden_size"),
    ("model.mlp_width", "n_inner", "intermediate_size"),
    ("model.context", "n_positions", "max_position_embeddings"),
    ("model.rotary_base", "", "rope_theta"),
    ("model.bias", "", "attention_bias"),
    ("model.tie_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    ("norm.eps", "layer_norm_epsilon", "rms_norm_eps"),
)
NAMES = {layout: {row[i]: row[0] for row in KEYS if row[i]} for i, layout in enumerate(FORMATS, 1)}
# What else a config.json may say of the model, and the values that mean ours.
FIXED: dict[str, dict[str, tuple]] = {
    GPT2: {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
    LLAMA: {"hidden_act": ("silu",), "rope_type": ("default",)},
}
# What to compare of keys whose default comes from other keys, or that mean nothing beside other keys. All others that affect
# the weights are compared as they are.
SIZES: dict[str, Callable[[Config, int], object]] = {
    "model.kv_heads": lambda cfg, _: cfg.model.kv_heads or cfg.model.heads,
    "model.qk_norm_kind": lambda cfg, _: cfg.model.qk_norm and (cfg.model.qk_norm_kind or cfg.norm.kind),
    "model.mlp_width": lambda cfg, _: mlp_width(cfg.model),
    "model.context": lambda cfg, _: cfg.model.positions is Positions.learned and cfg.model.context,
    "model.rotary_base": lambda cfg, _: cfg.model.positions is Positions.rotary and cfg.model.rotary_base,
    "model.vocab_size": lambda cfg, vocab_size: embedding_rows(cfg.model, vocab_size),
}


def differences(ours: Config, theirs: Config, vocab_size: int, free: Collection[str] = ()) -> list[str]:
    """The keys in which two configs describe different models. Sizes are compared only if all other keys are the same.

    Args:
        vocab_size: of the tokenizer.
        free: keys that may differ.
    """

    def value(key: str, cfg: Config) -> object:
        return SIZES[key](cfg, vocab_size) if key in SIZES else attrgetter(key)(cfg)

    def among(names: Iterable[str]) -> list[str]:
        values = [(key, value(key, ours), value(key, theirs)) for key in names if key not in free]
        return [f"{key}={keys.shown(own)}: it has {keys.shown(its)}." for key, own, its in values if own != its]

    return among(key for key in keys.affecting("weights") if key not in SIZES) or among(SIZES)


def unsupported(layout: str, cfg: Config) -> list[str]:
    """The keys in which a model differs from what its config.json in this layout would describe: empty if that can hold it."""
    free = {"model.vocab_size"} | ({"model.bias"} if layout == GPT2 else set())  # missing biases become zeros
    return differences(cfg, from_config(layout, to_config(layout, cfg, 0, None)), 0, free)


def to_config(layout: str, cfg: Config, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of a model in this layout."""
    model = cfg.model
    given = {name: attrgetter(key)(cfg) for name, key in NAMES[layout].items()}
    attention_dropout = model.dropout if model.attention_dropout is None else model.attention_dropout
    if layout == GPT2:
        given |= {"architectures": ["GPT2LMHeadModel"], "n_inner": mlp_width(model), "attn_pdrop": attention_dropout}
        given |= {"embd_pdrop": model.dropout, "resid_pdrop": model.dropout}
    else:
        given |= {"architectures": ["LlamaForCausalLM"], "intermediate_size": mlp_width(model), "mlp_bias": model.bias}
        given |= {"num_key_value_heads": model.kv_heads or model.heads, "head_dim": model.width // model.heads}
        given |= {"attention_dropout": attention_dropout}
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    fixed = {name: values[0] for name, values in FIXED[layout].items()}
    return fixed | given | ends | {"model_type": layout, "vocab_size": vocab_size, "torch_dtype": "float32"}


def from_config(layout: str, theirs: dict[str, Any]) -> Config:
    """The model that a config.json describes, with all else at its default.

    Raises:
        ConfigError: this program has no such model.
    """
    if layout == GPT2:
        usual = {"n_inner": 4 * theirs["n_embd"], "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
        fixed = FIXED[layout]
    else:
        rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        usual = {"rope_theta": 10000.0, "rope_type": rope.get("type", "default")} | rope
        usual |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False, "num_key_value_heads": None}
        head_dim = theirs["hidden_size"] // theirs["num_attention_heads"]
        fixed = FIXED[layout] | {"mlp_bias": (theirs.get("attention_bias", False),), "head_dim": (head_dim,)}
    theirs = usual | {name: value for name, value in theirs.items() if value is not None}
    if other := [name for name, values in fixed.items() if theirs.get(name, values[0]) not in values]:
        raise ConfigError(f"{other[0]}={theirs[other[0]]} in its config.json: this program has no such model.")
    cfg = Config()
    for name, key in NAMES[layout].items():
        group, _, field = key.partition(".")
        setattr(getattr(cfg, group), field, theirs[name])
    cfg.model.positions = Positions.learned if layout == GPT2 else Positions.rotary
    cfg.model.activation = Activation.gelu if layout == GPT2 else Activation.swiglu
    cfg.norm.kind = NormKind.layernorm if layout == GPT2 else NormKind.rmsnorm
    if layout == GPT2:
        cfg.model.bias = True
    return cfg


# ---- tensors -----------------------------------------------------------------------------------------------------------------


# Modules of ours, GPT-2's and Llama's; {} is the number of a block.
MODULES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("embedding", ("transformer.wte",), ("model.embed_tokens",)),
    ("positions", ("transformer.wpe",), ()),
    ("blocks.{}.attention_norm", ("transformer.h.{}.ln_1",), ("model.layers.{}.input_layernorm",)),
    (
        "blocks.{}.attention.qkv",
        ("transformer.h.{}.attn.c_attn",),
        tuple(f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkv"),
    ),
    ("blocks.{}.attention.out", ("transformer.h.{}.attn.c_proj",), ("model.layers.{}.self_attn.o_proj",)),
    ("blocks.{}.mlp_norm", ("transformer.h.{}.ln_2",), ("model.layers.{}.post_attention_layernorm",)),
    ("blocks.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj")),
    ("blocks.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), ("model.layers.{}.mlp.down_proj",)),
    ("final_norm", ("transformer.ln_f",), ("model.norm",)),
    ("head", ("lm_head",), ("lm_head",)),
)


class Entry(NamedTuple):
    """One tensor of ours, and the layout's tensors that make it: transposed if `transposed`, then joined along dim 0."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]  # of ours for each of theirs; the rest is padding. Empty: all
    transposed: bool


def entries(layout: str, cfg: ModelConfig, vocab_size: int) -> Iterator[Entry]:
    """Every tensor of a model with this vocabulary."""
    kv_width = (cfg.kv_heads or cfg.heads) * (cfg.width // cfg.heads)
    rows: dict[str, tuple[int, ...]] = {"embedding": (vocab_size,), "head": (vocab_size,)}
    if layout == LLAMA:
        rows |= {"blocks.{}.attention.qkv": (cfg.width, kv_width, kv_width), "blocks.{}.mlp.up": (mlp_width(cfg),) * 2}
    for ours, *theirs in MODULES:
        names, linear = theirs[FORMATS.index(layout)], ".attention." in ours or ".mlp." in ours
        has_bias = (linear and cfg.bias) if layout == LLAMA else (linear or "norm" in ours)
        if not names or (ours == "head" and cfg.tie_embeddings):
            continue
        for block in range(cfg.layers if "{}" in ours else 1):
            for what in ("weight", "bias") if has_bias else ("weight",):
                full = [f"{name}.{what}".format(block) for name in (ours, *names)]
                transposed = layout == GPT2 and linear and what == "weight"
                yield Entry(full[0], tuple(full[1:]), rows.get(ours, ()), transposed)


def to_layout(ours: dict[str, torch.Tensor], layout: str, cfg: Config, vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors of the layout, without padding of the vocabulary. GPT-2 has biases everywhere; missing ones become zeros."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(layout, cfg.model, vocab_size):
        value = ours.get(entry.ours)
        if value is None:
            value = torch.zeros(len(ours[entry.ours.replace(".bias", ".weight")]))
        parts = value[: sum(entry.rows)].split(entry.rows) if entry.rows else (value,)
        tensors |= {name: part.T if entry.transposed else part for name, part in zip(entry.theirs, parts, strict=True)}
    return tensors


def export(path: Path, layout: str, output: Path | None = None) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json. Returns their folder.

    Args:
        path: a run (its newest checkpoint), or a checkpoint, such as RUN/best.
        layout: gpt2 or llama.
        output: a folder, made if need be; None: export_LAYOUT in the run, or beside a checkpoint that stands alone.

    Raises:
        ConfigError: no checkpoint there, a model that the layout can't express, or an output that is a run or a checkpoint.
        StorageError: the folder can't be written.
    """
    stored = checkpoint.read(path)
    cfg, tokenizer = stored.cfg, Tokenizer.load(stored.path / checkpoint.TOKENIZER)
    if wrong := unsupported(layout, cfg):
        raise ConfigError(f"the layout {layout} can't hold the model of {path}:\n" + "\n".join(wrong))
    beside = stored.path.parent
    output = output or (beside.parent if beside.name == storage.FOLDER else beside) / f"export_{layout}"
    if any((output / name).exists() for name in ("config.yaml", storage.FOLDER, storage.SUMS)):
        raise ConfigError(f"--output {output}: it is a run or a checkpoint, whose files stay. Name a new folder.")
    end = tokenizer.end_of_text
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": cfg.model.context}
    if end is not None:
        tokenizer_config["eos_token"] = tokenizer.decode([end], skip_special=False)
    with storage.as_storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    tensors = to_layout(stored.model(), layout, cfg, tokenizer.vocab_size)
    storage.replace(output / "model.safetensors", checkpoint.serialize(tensors))
    storage.replace_text(output / "tokenizer.json", stored.tokenizer)
    model_config = to_config(layout, cfg, tokenizer.vocab_size, end)
    for name, content in (("config.json", model_config), ("tokenizer_config.json", tokenizer_config)):
        storage.replace_text(output / name, json.dumps(content, indent=2) + "\n")
    return output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.export", description="A trained model in a layout of the Hugging Face Hub."
    )
    parser.add_argument("path", type=Path, help="a run folder, or a checkpoint such as runs/FOLDER/best")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", type=Path, help="a folder (default: export_FORMAT in the run folder)")
    args = parser.parse_args(arguments)
    try:
        output = export(args.path, args.format, args.output)
    except (ConfigError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{relative(output)}: config.json, model.safetensors, tokenizer.json, tokenizer_config.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
