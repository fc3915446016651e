"""The layouts of GPT-2 and Llama on the Hugging Face Hub: weights to begin with, and the export of a trained model.

python train.py init_from=openai-community/gpt2 ...        also a folder in one of the layouts, or a run of train.py
python -m training.export runs/FOLDER --format gpt2        or llama; writes runs/FOLDER/export_gpt2

GPT-2 stores its linear weights as [in, out], the transpose of ours. Llama stores separately what we join in one product:
queries, keys and values, and the two halves of a SwiGLU. Llama's rotary pairs on the Hub are ours: feature i with
i + head_width / 2.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from configs import Config, ConfigError, as_config_errors, keys, machine
from configs.schema import Activation, ModelConfig, NormKind, Positions
from data import Tokenizer
from measure.files import StorageError, as_storage_errors, relative, replacing
from model import GPT
from model.gpt import embedding_rows
from model.mlp import mlp_width
from training import checkpoint, storage

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
    """The keys in which two configs describe different models, but for those in `free`. Sizes are compared only if all other
    keys are the same."""

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


# ---- weights to begin with ---------------------------------------------------------------------------------------------------

# Masks and tables in some files, which follow from the config and are no weights.
NO_WEIGHTS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")


def load(model: GPT, source: str, tokenizer: Tokenizer) -> None:
    """Fills `model` with weights that were trained before.

    Args:
        source: a run of train.py (its newest checkpoint) or one of its checkpoints; a folder with config.json and
            model.safetensors (or its parts), of a GPT-2 or a Llama; owner/name of such a one on the Hub.
        tokenizer: of the model.

    Raises:
        ConfigError: no such weights, or weights of another model or of other tokens; the message names the keys.
    """
    path, ours = machine.expanded(source), Config(model=model.cfg, norm=model.norm, loss=model.loss)
    try:
        if not path.exists() and source.count("/") == 1 and not path.parent.is_dir():
            import huggingface_hub  # here, as it takes a while and few runs need it

            path = Path(huggingface_hub.snapshot_download(source, allow_patterns=["config.json", "model*.safetensors"]))
        if (path / "config.json").is_file():
            _load_layout(model, ours, path)
            return
        stored = checkpoint.read(path)
        _refuse(differences(ours, stored.cfg, model.tokenizer_vocab_size))
        if stored.tokenizer != tokenizer.to_json():
            raise ConfigError(stored.other_tokenizer)
        checkpoint.load_weights(model, stored)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"init_from={source}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"init_from={source}: not a GPT-2 or Llama of the Hub: it has no {error}.") from error


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ConfigError("another model than this run's:\n" + "\n".join(wrong))


@torch.no_grad()
def _load_layout(model: GPT, ours: Config, folder: Path) -> None:
    """Fills `model` with the weights of a GPT-2 or a Llama.

    Rows that the vocabulary is padded with get the mean of the others. Zeros would not do: GPT-2's logits lie far below zero,
    where the padding would be the likeliest token. With the mean, real tokens keep their logits, and as the mean of exp is at
    least exp of the mean, the loss is at most ln(padded size / size) too high.
    """
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layout, size = theirs["model_type"], model.tokenizer_vocab_size
    if layout not in FORMATS:
        raise ConfigError(f"a model of type {layout}; known are {' and '.join(FORMATS)}.")
    described, free = from_config(layout, theirs), {"model.vocab_size"}
    if model.cfg.context < described.model.context:  # the first positions are enough
        free.add("model.context")
    _refuse(differences(ours, described, size, free))
    tensors: dict[str, torch.Tensor] = {}
    files = list(folder.glob("model*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has no model*.safetensors. Other formats are not read, as a .bin can run code: save the model anew with "
            "transformers' save_pretrained."
        )
    for file in files:
        tensors |= {name: tensor for name, tensor in load_file(file).items() if not NO_WEIGHTS.fullmatch(name)}
    if layout == GPT2:  # OpenAI's files on the Hub leave the prefix out
        tensors = {re.sub(r"^(?!transformer\.|lm_head\.)", "transformer.", name): of for name, of in tensors.items()}
    wanted, targets = list(entries(layout, model.cfg, size)), model.state_dict()
    if model.cfg.tie_embeddings and "lm_head.weight" in tensors:  # a file may have the shared tensor under either name
        tensors.setdefault(wanted[0].theirs[0], tensors.pop("lm_head.weight"))
    for entry in wanted:
        parts = [tensors.pop(name) for name in entry.theirs]
        value, target = torch.cat([part.T if entry.transposed else part for part in parts]).float(), targets[entry.ours]
        if entry.ours in ("embedding.weight", "head.weight"):
            if len(value) != size:
                raise ConfigError(
                    f"it has a vocabulary of {len(value):,}, the tokenizer one of {size:,}: the ids would mean other text. Use "
                    "the model's own tokenizer: tokenizer=gpt2, or tokenizer.kind=pretrained tokenizer.pretrained=owner/name."
                )
            value = torch.cat((value, value.mean(dim=0, keepdim=True).expand(len(target) - len(value), -1)))
        elif entry.ours == "positions.weight":
            value = value[: model.cfg.context]
        if value.shape != target.shape:
            raise ConfigError(f"{entry.theirs[0]} makes {tuple(value.shape)}, and {entry.ours} is {tuple(target.shape)}.")
        target.copy_(value)
    if tensors:
        raise ConfigError(f"it has tensors that this model has no place for: {', '.join(sorted(tensors)[:5])}.")


# ---- export ------------------------------------------------------------------------------------------------------------------


def export(path: Path, layout: str, output: Path | None = None) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json. Returns their folder.

    Args:
        path: a run (its newest checkpoint), or a checkpoint, such as RUN/best.
        layout: gpt2 or llama.
        output: a new or an empty folder; None: export_LAYOUT in the run, or beside the checkpoint.

    Raises:
        ConfigError: no checkpoint there, a model that the layout can't express, or a folder with other files.
        StorageError: the folder can't be written.
    """
    stored = checkpoint.read(path)
    cfg, tokenizer = stored.cfg, Tokenizer.load(stored.path / checkpoint.TOKENIZER)
    if wrong := unsupported(layout, cfg):
        raise ConfigError(f"the layout {layout} can't hold the model of {path}:\n" + "\n".join(wrong))
    beside = stored.path.parent
    output = output or (beside.parent if beside.name == storage.FOLDER else beside) / f"export_{layout}"
    with as_config_errors(f"--output {output}"):
        if output.exists() and any(output.iterdir()):
            raise ConfigError(f"--output {output}: it has files already. Name a new folder.")
    ours, vocab_size = stored.model(), tokenizer.vocab_size
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries(layout, cfg.model, vocab_size):
        value = ours.get(entry.ours)
        if value is None:  # GPT-2 has biases everywhere
            value = torch.zeros(len(ours[entry.ours.replace(".bias", ".weight")]))
        parts = value[: sum(entry.rows)].split(entry.rows) if entry.rows else (value,)
        tensors |= {name: part.T if entry.transposed else part for name, part in zip(entry.theirs, parts, strict=True)}
    end = tokenizer.end_of_text
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": cfg.model.context}
    if end is not None:
        described["eos_token"] = tokenizer.decode([end], skip_special=False)
    with as_storage_errors(output), replacing(output.resolve()) as temporary:
        temporary.mkdir()
        (temporary / "model.safetensors").write_bytes(checkpoint.serialize(tensors))
        (temporary / "tokenizer.json").write_text(stored.tokenizer, encoding="utf-8")
        for name, content in (("config", to_config(layout, cfg, vocab_size, end)), ("tokenizer_config", described)):
            (temporary / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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
