"""The layouts of GPT-2 and Llama on the Hugging Face Hub, and the export of a trained model in one of them.

python -m training.export runs/FOLDER --format gpt2        or llama; writes runs/FOLDER/export_gpt2

GPT-2 stores its linear weights as [in, out], the transpose of ours. Llama stores separately what we join in one product:
queries, keys and values, and the two halves of a SwiGLU. Llama's rotary pairs on the Hub are ours: feature i with
i + head_width / 2.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from configs import Config, ConfigError, keys
from configs.schema import Activation, LossConfig, ModelConfig, NormConfig, NormKind, Positions
from data import Tokenizer
from model.mlp import mlp_width
from training import checkpoint, storage
from training.storage import StorageError, relative

GPT2, LLAMA = "gpt2", "llama"
FORMATS = (GPT2, LLAMA)


@dataclass(frozen=True)
class Entry:
    """One tensor of ours, and the layout's tensors that make it: transposed if `transposed`, then joined along dim 0."""

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...]  # rows of ours for each of theirs
    transposed: bool = False


def entries(layout: str, cfg: ModelConfig, vocab_size: int) -> Iterator[Entry]:
    """Every tensor of a model with this vocabulary."""
    return (_gpt2 if layout == GPT2 else _llama)(cfg, vocab_size)


# Keys that the config.json of both layouts expresses, or that mean nothing where the layout has another kind of positions.
EXPRESSED = {f"model.{name}" for name in ("layers", "heads", "kv_heads", "width", "mlp_width", "context", "vocab_size")}
EXPRESSED |= {"model.bias", "model.tie_embeddings", "model.rotary_base", "norm.eps"}


def unsupported(layout: str, cfg: ModelConfig, norm: NormConfig, loss: LossConfig) -> list[str]:
    """The keys of a config that the layout can't express; empty if it can hold the model.

    A key that affects the weights and that no layout is known to express has to have its default.
    """
    ours, default = Config(model=replace(cfg, kv_heads=cfg.kv_heads or cfg.heads), norm=norm, loss=loss), Config()
    only: dict[str, Any] = {
        "model.positions": Positions.learned if layout == GPT2 else Positions.rotary,
        "model.activation": Activation.gelu if layout == GPT2 else Activation.swiglu,
        "norm.kind": NormKind.layernorm if layout == GPT2 else NormKind.rmsnorm,
    }
    if layout == GPT2:
        only["model.kv_heads"] = cfg.heads
    only = {key: attrgetter(key)(default) for key in keys.affecting("weights") if key not in EXPRESSED} | only
    return [
        f"{key}={keys.shown(given)}, the layout has {keys.shown(value)}"
        for key, value in only.items()
        if (given := attrgetter(key)(ours)) != value
    ]


def config(layout: str, cfg: ModelConfig, norm: NormConfig, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of a model in this layout."""
    shared = {
        "vocab_size": vocab_size,
        "tie_word_embeddings": cfg.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }
    dropout = cfg.dropout if cfg.attention_dropout is None else cfg.attention_dropout
    if layout == GPT2:
        return shared | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": cfg.layers,
            "n_head": cfg.heads,
            "n_embd": cfg.width,
            "n_inner": mlp_width(cfg),
            "n_positions": cfg.context,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": norm.eps,
            "embd_pdrop": cfg.dropout,
            "resid_pdrop": cfg.dropout,
            "attn_pdrop": dropout,
        }
    return shared | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads or cfg.heads,
        "head_dim": cfg.width // cfg.heads,
        "hidden_size": cfg.width,
        "intermediate_size": mlp_width(cfg),
        "max_position_embeddings": cfg.context,
        "hidden_act": "silu",
        "rms_norm_eps": norm.eps,
        "rope_theta": cfg.rotary_base,
        "attention_bias": cfg.bias,
        "mlp_bias": cfg.bias,
        "attention_dropout": dropout,
    }


def differences(layout: str, theirs: dict[str, Any], cfg: ModelConfig, norm: NormConfig) -> list[str]:
    """A line for each of our keys in which a config.json describes another model than this run's config."""
    if layout == GPT2:
        wanted = {
            "model.layers": (cfg.layers, theirs["n_layer"]),
            "model.heads": (cfg.heads, theirs["n_head"]),
            "model.width": (cfg.width, theirs["n_embd"]),
            "model.mlp_width": (mlp_width(cfg), theirs.get("n_inner") or 4 * theirs["n_embd"]),
            "norm.eps": (norm.eps, theirs.get("layer_norm_epsilon", 1e-5)),
            "model.tie_embeddings": (cfg.tie_embeddings, theirs.get("tie_word_embeddings", True)),
            "model.bias": (cfg.bias, True),
        }
        beyond = {
            "activation_function": theirs.get("activation_function", "gelu_new") in ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": theirs.get("scale_attn_weights", True),
            "scale_attn_by_inverse_layer_idx": not theirs.get("scale_attn_by_inverse_layer_idx", False),
        }
        context = theirs["n_positions"]
    else:
        rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
        heads = theirs["num_attention_heads"]
        wanted = {
            "model.layers": (cfg.layers, theirs["num_hidden_layers"]),
            "model.heads": (cfg.heads, heads),
            "model.kv_heads": (cfg.kv_heads or cfg.heads, theirs.get("num_key_value_heads") or heads),
            "model.width": (cfg.width, theirs["hidden_size"]),
            "model.mlp_width": (mlp_width(cfg), theirs["intermediate_size"]),
            "model.rotary_base": (cfg.rotary_base, theirs.get("rope_theta", rope.get("rope_theta", 10000.0))),
            "norm.eps": (norm.eps, theirs.get("rms_norm_eps", 1e-6)),
            "model.tie_embeddings": (cfg.tie_embeddings, theirs.get("tie_word_embeddings", False)),
            "model.bias": (cfg.bias, theirs.get("attention_bias", False)),
        }
        beyond = {
            "hidden_act": theirs.get("hidden_act", "silu") == "silu",
            "head_dim": theirs.get("head_dim") in (None, theirs["hidden_size"] // heads),
            "rope_type": rope.get("rope_type", rope.get("type", "default")) == "default",
            "mlp_bias": theirs.get("mlp_bias", False) == theirs.get("attention_bias", False),
        }
        context = theirs["max_position_embeddings"]
    found = [f"{key}={keys.shown(ours)}: it has {keys.shown(its)}." for key, (ours, its) in wanted.items() if ours != its]
    if cfg.context > context:
        found.append(f"model.context={cfg.context}: it has {context}.")
    return found + [f"{key} in its config.json: this program has no such model." for key, known in beyond.items() if not known]


def _gpt2(cfg: ModelConfig, vocab_size: int) -> Iterator[Entry]:
    width, hidden = cfg.width, mlp_width(cfg)

    def pair(ours: str, theirs: str, size: int, transposed: bool = False) -> Iterator[Entry]:
        yield Entry(f"{ours}.weight", (f"{theirs}.weight",), (size,), transposed)
        yield Entry(f"{ours}.bias", (f"{theirs}.bias",), (size,))

    yield Entry("embedding.weight", ("transformer.wte.weight",), (vocab_size,))
    yield Entry("positions.weight", ("transformer.wpe.weight",), (cfg.context,))
    for i in range(cfg.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        yield from pair(f"{ours}.attention_norm", f"{theirs}.ln_1", width)
        yield from pair(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", 3 * width, transposed=True)
        yield from pair(f"{ours}.attention.out", f"{theirs}.attn.c_proj", width, transposed=True)
        yield from pair(f"{ours}.mlp_norm", f"{theirs}.ln_2", width)
        yield from pair(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", hidden, transposed=True)
        yield from pair(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", width, transposed=True)
    yield from pair("final_norm", "transformer.ln_f", width)
    if not cfg.tie_embeddings:
        yield Entry("head.weight", ("lm_head.weight",), (vocab_size,))


def _llama(cfg: ModelConfig, vocab_size: int) -> Iterator[Entry]:
    width, hidden = cfg.width, mlp_width(cfg)
    kv_width = (cfg.kv_heads or cfg.heads) * (width // cfg.heads)
    yield Entry("embedding.weight", ("model.embed_tokens.weight",), (vocab_size,))
    for i in range(cfg.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield Entry(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",), (width,))
        yield Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",), (width,))
        for what in ("weight", "bias") if cfg.bias else ("weight",):
            qkv = tuple(f"{theirs}.self_attn.{name}_proj.{what}" for name in "qkv")
            halves = tuple(f"{theirs}.mlp.{name}_proj.{what}" for name in ("gate", "up"))
            yield Entry(f"{ours}.attention.qkv.{what}", qkv, (width, kv_width, kv_width))
            yield Entry(f"{ours}.attention.out.{what}", (f"{theirs}.self_attn.o_proj.{what}",), (width,))
            yield Entry(f"{ours}.mlp.up.{what}", halves, (hidden, hidden))
            yield Entry(f"{ours}.mlp.down.{what}", (f"{theirs}.mlp.down_proj.{what}",), (width,))
    yield Entry("final_norm.weight", ("model.norm.weight",), (width,))
    if not cfg.tie_embeddings:
        yield Entry("head.weight", ("lm_head.weight",), (vocab_size,))


def export(path: Path, layout: str, output: Path) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Args:
        path: a run (its newest checkpoint), or a checkpoint, such as a run's link `best`.
        layout: gpt2 or llama.
        output: a folder, made if need be.

    Raises:
        ConfigError: no checkpoint there, a model that the layout can't express, or an output that is a run or a checkpoint.
        StorageError: the folder can't be written.
    """
    stored = checkpoint.read(path)
    cfg, tokenizer = stored.cfg, Tokenizer.load(stored.path / checkpoint.TOKENIZER)
    if wrong := unsupported(layout, cfg.model, cfg.norm, cfg.loss):
        raise ConfigError(f"{path} can't be written in the layout {layout}:\n" + "\n".join(f"{line}." for line in wrong))
    tensors = to_layout(stored.model(), layout, cfg, tokenizer.vocab_size)
    end = tokenizer.end_of_text
    model_config = config(layout, cfg.model, cfg.norm, tokenizer.vocab_size, end)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": cfg.model.context}
    if end is not None:
        tokenizer_config["eos_token"] = tokenizer.decode([end], skip_special=False)
    for folder in (output, *output.resolve().parents):
        if checkpoint.is_of_a_run(folder) and (folder == output or (folder / storage.SUMS).exists()):
            raise ConfigError(f"--output {output}: {folder} is a run or a checkpoint, whose files stay. Name a new folder.")
    with storage.as_storage_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    storage.replace(output / "model.safetensors", partial(checkpoint.write_tensors, tensors=tensors))
    storage.replace_text(output / "tokenizer.json", stored.tokenizer)
    for name, content in (("config.json", model_config), ("tokenizer_config.json", tokenizer_config)):
        storage.replace_text(output / name, json.dumps(content, indent=2) + "\n")


def to_layout(ours: dict[str, torch.Tensor], layout: str, cfg: Config, vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors of the layout, without padding of the vocabulary. GPT-2 has biases everywhere; missing ones become zeros."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(layout, cfg.model, vocab_size):
        value = ours[entry.ours] if entry.ours in ours else torch.zeros(sum(entry.sizes))
        parts = value[: sum(entry.sizes)].split(entry.sizes)
        tensors |= {name: part.T if entry.transposed else part for name, part in zip(entry.theirs, parts, strict=True)}
    return tensors


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.export", description="A trained model in a layout of the Hugging Face Hub."
    )
    parser.add_argument("path", type=Path, help="a run folder, or a checkpoint such as runs/FOLDER/best")
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--output", type=Path, help="a folder (default: export_FORMAT in the run folder)")
    args = parser.parse_args(arguments)
    try:
        path = checkpoint.locate(args.path)
        beside = path.parent.parent if path.parent.name == storage.FOLDER else path.parent
        output = args.output or beside / f"export_{args.format}"
        export(args.path, args.format, output)
    except (ConfigError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{relative(output)}: config.json, model.safetensors, tokenizer.json, tokenizer_config.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
