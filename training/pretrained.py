"""init_from: a new run begins with the weights of another run, or with those of a GPT-2 or Llama of the Hugging Face Hub."""

import json
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from configs import Config, ConfigError, keys, machine
from configs.schema import Positions
from data import Tokenizer
from model import GPT
from model.gpt import embedding_rows
from model.mlp import mlp_width
from training import checkpoint, export, storage

# Masks and tables in some files, which follow from the config and are no weights.
NO_WEIGHTS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")

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


def load(model: GPT, source: str, tokenizer: Tokenizer) -> None:
    """Fills `model` with weights that were trained before.

    Args:
        source: a run of train.py (its newest checkpoint) or one of its checkpoints; a folder with config.json and
            model.safetensors (or its parts and their index), of a GPT-2 or a Llama; owner/name of such a one on the Hub; or a
            file in one of these folders.
        tokenizer: of the model.

    Raises:
        ConfigError: no such weights, or weights of another model or of other tokens; the message names the keys.
    """
    path = machine.expanded(source)
    folder = storage.run_of(path.parent if path.is_file() else path)
    if checkpoint.is_of_a_run(folder) and (storage.checkpoints(folder) or not (folder / "config.json").is_file()):
        _of_run(model, source, folder, tokenizer)
    else:
        _of_layout(model, source)


def _of_run(model: GPT, source: str, folder: Path, tokenizer: Tokenizer) -> None:
    try:
        stored = checkpoint.read(folder)
        ours = Config(model=model.cfg, norm=model.norm, loss=model.loss)
        if wrong := _differences(ours, stored.cfg, model.tokenizer_vocab_size):
            raise ConfigError("another model than this run's:\n" + "\n".join(wrong))
        if stored.tokenizer != tokenizer.to_json():
            raise ConfigError(stored.other_tokenizer)
        checkpoint.load_weights(model, stored)
    except ConfigError as error:
        raise ConfigError(f"init_from={source}: {error}") from error


def _differences(ours: Config, theirs: Config, vocab_size: int) -> list[str]:
    """The keys in which two configs describe different models. Sizes are compared only if all other keys are the same."""

    def value(key: str, cfg: Config) -> object:
        return SIZES[key](cfg, vocab_size) if key in SIZES else attrgetter(key)(cfg)

    def among(names: Iterable[str]) -> list[str]:
        values = [(key, value(key, ours), value(key, theirs)) for key in names]
        return [f"{key}={keys.shown(own)}: it has {keys.shown(its)}." for key, own, its in values if own != its]

    return among(key for key in keys.affecting("weights") if key not in SIZES) or among(SIZES)


@torch.no_grad()
def _of_layout(model: GPT, source: str) -> None:
    """Fills `model` with the weights of a GPT-2 or a Llama.

    Rows that the vocabulary is padded with get the mean of the others. Zeros would not do: GPT-2's logits lie far below zero,
    where the padding would be the likeliest token. With the mean, real tokens keep their logits, and as the mean of exp is at
    least exp of the mean, the loss is at most ln(padded size / size) too high.

    Raises:
        ConfigError: no such weights, or weights of another model; the message names the keys.
    """
    folder = _folder(source)
    try:
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layout = theirs["model_type"]
        if layout not in export.FORMATS:
            raise ConfigError(f"init_from={source} is a model of type {layout}; known are {' and '.join(export.FORMATS)}.")
        wrong = [f"{line}." for line in export.unsupported(layout, model.cfg, model.norm, model.loss)]
        wrong += export.differences(layout, theirs, model.cfg, model.norm)
        if wrong:
            raise ConfigError(f"init_from={source} is another model than this run's:\n" + "\n".join(wrong))
        tensors = _tensors(folder)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"init_from={source}: no run of train.py, and not a GPT-2 or Llama with config.json and model.safetensors: "
            f"{type(error).__name__}: {error}"
        ) from error
    _fill(model, layout, tensors, source)


def _fill(model: GPT, layout: str, tensors: dict[str, torch.Tensor], source: str) -> None:
    cfg, ours = model.cfg, model.state_dict()
    if layout == export.GPT2:  # OpenAI's files on the Hub leave the prefix out
        full = {name: name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}" for name in tensors}
        tensors = {full[name]: tensor for name, tensor in tensors.items()}
    left = {name for name in tensors if not NO_WEIGHTS.fullmatch(name)}
    if cfg.tie_embeddings and "lm_head.weight" in tensors:  # a file may have the shared tensor under either name
        head = tensors["lm_head.weight"]
        (embedding,) = next(export.entries(layout, cfg, model.tokenizer_vocab_size)).theirs
        if not torch.equal(tensors.setdefault(embedding, head), head):
            raise ConfigError(
                f"init_from={source} ties its embeddings by its config.json, but lm_head.weight is not {embedding}."
            )
        left.discard("lm_head.weight")
    for entry in export.entries(layout, cfg, model.tokenizer_vocab_size):
        missing = [name for name in entry.theirs if name not in tensors]
        if missing:
            raise ConfigError(f"init_from={source} has no tensor {missing[0]}, from which {entry.ours} comes.")
        left -= set(entry.theirs)
        parts = [tensors[name].T if entry.transposed else tensors[name] for name in entry.theirs]
        value, target = torch.cat(parts), ours[entry.ours]
        if entry.ours in ("embedding.weight", "head.weight"):
            if len(value) != model.tokenizer_vocab_size:
                raise ConfigError(
                    f"init_from={source} has a vocabulary of {len(value):,}, the tokenizer one of "
                    f"{model.tokenizer_vocab_size:,}: the ids would mean other text. Use the model's own tokenizer: "
                    "tokenizer=gpt2, or tokenizer.kind=pretrained with tokenizer.pretrained=owner/name."
                )
            padding = value.float().mean(dim=0, keepdim=True).expand(len(target) - len(value), -1)
            value = torch.cat((value.float(), padding))
        elif entry.ours == "positions.weight":
            value = value[: cfg.context]
        if value.shape != target.shape:
            raise ConfigError(
                f"init_from={source}: {', '.join(entry.theirs)} makes {tuple(value.shape)}, "
                f"and {entry.ours} is {tuple(target.shape)}."
            )
        target.copy_(value)
    if left:
        raise ConfigError(f"init_from={source} has tensors that this model has no place for: {', '.join(sorted(left)[:5])}.")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def _folder(source: str) -> Path:
    """The folder of the files: local, or in the Hub's cache after a download."""
    path = machine.expanded(source)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    of_owner = source.count("/") == 1 and not path.parent.is_dir()  # runs/nmae is a mistyped folder if runs/ is a folder
    if source.startswith(("/", ".", "~")) or ("/" in source and not of_owner):
        raise ConfigError(
            f"init_from={source}: no such folder.{checkpoint.runs_beside(path)} Give that of a run or of a checkpoint, one "
            "with config.json and model.safetensors, or owner/name on the Hub."
        )
    import huggingface_hub  # here, as it takes a while and few runs need it

    try:
        wanted = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=wanted))
    except Exception as error:  # each reason (offline, unknown, refused) has its own class
        raise ConfigError(
            f"init_from={source} is neither a folder here nor a repository that the Hugging Face Hub would give "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the name and the network."
        ) from error
