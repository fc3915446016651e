"""init_from: a new run begins with the weights of another run, or with those of a GPT-2 or Llama of the Hugging Face Hub."""

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from configs import Config, ConfigError, machine
from data import Tokenizer
from model import GPT
from training import checkpoint, export
from training.checkpoint import Stored

# Masks and tables in some files, which follow from the config and are no weights.
NO_WEIGHTS = re.compile(r".*\.attn\.(masked_)?bias|.*rotary_emb\.inv_freq")


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
    folder = path.parent if path.is_file() else path
    ours = Config(model=model.cfg, norm=model.norm, loss=model.loss)
    try:
        if _is_on_the_hub(source):
            _of_layout(model, ours, _downloaded(source))
        elif (folder / "config.json").is_file():
            _of_layout(model, ours, folder)
        else:
            _of_run(model, ours, checkpoint.read(path), tokenizer)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"init_from={source}: {error}") from error
    except (KeyError, TypeError) as error:
        raise ConfigError(f"init_from={source}: not the config.json of a GPT-2 or Llama: {error!r}") from error


def _of_run(model: GPT, ours: Config, stored: Stored, tokenizer: Tokenizer) -> None:
    if wrong := export.differences(ours, stored.cfg, model.tokenizer_vocab_size):
        raise ConfigError("another model than this run's:\n" + "\n".join(wrong))
    if stored.tokenizer != tokenizer.to_json():
        raise ConfigError(stored.other_tokenizer)
    checkpoint.load_weights(model, stored)


@torch.no_grad()
def _of_layout(model: GPT, ours: Config, folder: Path) -> None:
    """Fills `model` with the weights of a GPT-2 or a Llama.

    Rows that the vocabulary is padded with get the mean of the others. Zeros would not do: GPT-2's logits lie far below zero,
    where the padding would be the likeliest token. With the mean, real tokens keep their logits, and as the mean of exp is at
    least exp of the mean, the loss is at most ln(padded size / size) too high.
    """
    theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layout = theirs["model_type"]
    if layout not in export.FORMATS:
        raise ConfigError(f"a model of type {layout}; known are {' and '.join(export.FORMATS)}.")
    described, free = export.from_config(layout, theirs), {"model.vocab_size"}
    if model.cfg.context < described.model.context:  # the first positions are enough
        free.add("model.context")
    if wrong := export.differences(ours, described, model.tokenizer_vocab_size, free):
        raise ConfigError("another model than this run's:\n" + "\n".join(wrong))
    tensors = _tensors(folder)
    if layout == export.GPT2:  # OpenAI's files on the Hub leave the prefix out
        tensors = {
            name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensors[name] for name in tensors
        }
    wanted = list(export.entries(layout, model.cfg, model.tokenizer_vocab_size))
    left = {name for name in tensors if not NO_WEIGHTS.fullmatch(name)}
    if model.cfg.tie_embeddings and "lm_head.weight" in tensors:  # a file may have the shared tensor under either name
        head, (embedding,) = tensors["lm_head.weight"], wanted[0].theirs
        if not torch.equal(tensors.setdefault(embedding, head), head):
            raise ConfigError(f"it ties its embeddings by its config.json, but lm_head.weight is not {embedding}.")
        left.discard("lm_head.weight")
    if missing := [name for entry in wanted for name in entry.theirs if name not in tensors]:
        raise ConfigError(f"it has no tensor {missing[0]}.")
    if left := left - {name for entry in wanted for name in entry.theirs}:
        raise ConfigError(f"it has tensors that this model has no place for: {', '.join(sorted(left)[:5])}.")
    targets = model.state_dict()
    for entry in wanted:
        value = torch.cat([tensors[name].T if entry.transposed else tensors[name] for name in entry.theirs]).float()
        target = targets[entry.ours]
        if entry.ours in ("embedding.weight", "head.weight"):
            if len(value) != model.tokenizer_vocab_size:
                raise ConfigError(
                    f"it has a vocabulary of {len(value):,}, the tokenizer one of {model.tokenizer_vocab_size:,}: the ids "
                    "would mean other text. Use the model's own tokenizer: tokenizer=gpt2, or tokenizer.kind=pretrained "
                    "with tokenizer.pretrained=owner/name."
                )
            value = torch.cat((value, value.mean(dim=0, keepdim=True).expand(len(target) - len(value), -1)))
        elif entry.ours == "positions.weight":
            value = value[: model.cfg.context]
        if value.shape != target.shape:
            raise ConfigError(f"{entry.theirs[0]} makes {tuple(value.shape)}, and {entry.ours} is {tuple(target.shape)}.")
        target.copy_(value)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return load_file(folder / "model.safetensors")
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def _is_on_the_hub(source: str) -> bool:
    path = machine.expanded(source)
    if path.exists() or source.startswith(("/", ".", "~")) or source.count("/") > 1:
        return False
    return "/" not in source or not path.parent.is_dir()  # runs/nmae is a mistyped folder if runs/ is a folder


def _downloaded(source: str) -> Path:
    """The folder of the files in the Hub's cache."""
    import huggingface_hub  # here, as it takes a while and few runs need it

    try:
        wanted = ["config.json", "model*.safetensors", "model.safetensors.index.json"]
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=wanted))
    except Exception as error:  # each reason (offline, unknown, refused) has its own class
        raise ConfigError(
            "neither a folder here nor a repository that the Hugging Face Hub would give "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Check the name and the network."
        ) from error
