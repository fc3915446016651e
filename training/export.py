"""A trained model in a layout of the Hugging Face Hub, for `transformers` and whatever reads its files.

python -m training.export runs/FOLDER --format gpt2        or llama; writes runs/FOLDER/export_gpt2
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch

import configs
from configs import Config, ConfigError
from data import Tokenizer
from training import checkpoint, layouts, storage
from training.storage import StorageError, relative


def export(path: Path, layout: str, output: Path) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Args:
        path: a run (its newest checkpoint), or a checkpoint, such as a run's link `best`.
        layout: gpt2 or llama.
        output: a folder, made if need be.

    Raises:
        ConfigError: no checkpoint there, or a model that the layout can't express.
        StorageError: the folder can't be written.
    """
    stored = checkpoint.read(path)
    cfg, tokenizer = configs.from_dict(stored.config), Tokenizer.load(stored.path / checkpoint.TOKENIZER)
    if wrong := layouts.unsupported(layout, cfg.model, cfg.norm):
        raise ConfigError(f"{path} can't be written in the layout {layout}:\n" + "\n".join(f"{line}." for line in wrong))
    tensors = to_layout(stored.model(), layout, cfg, tokenizer.vocab_size)
    end = tokenizer.end_of_text
    model_config = layouts.config(layout, cfg.model, cfg.norm, tokenizer.vocab_size, end)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": cfg.model.context}
    if end is not None:
        tokenizer_config["eos_token"] = tokenizer.decode([end], skip_special=False)
    with storage.explained(output):
        output.mkdir(parents=True, exist_ok=True)
    storage.replace(output / "model.safetensors", partial(checkpoint.write_tensors, tensors=tensors))
    storage.replace_text(output / "tokenizer.json", stored.tokenizer)
    for name, content in (("config.json", model_config), ("tokenizer_config.json", tokenizer_config)):
        storage.replace_text(output / name, json.dumps(content, indent=2) + "\n")


def to_layout(ours: dict[str, torch.Tensor], layout: str, cfg: Config, vocab_size: int) -> dict[str, torch.Tensor]:
    """Their tensors, without the rows that pad our vocabulary. GPT-2 has biases everywhere; a model without gets zeros."""
    tensors: dict[str, torch.Tensor] = {}
    for entry in layouts.entries(layout, cfg.model, vocab_size):
        value = ours[entry.ours] if entry.ours in ours else torch.zeros(sum(entry.sizes))
        parts = value[: sum(entry.sizes)].split(entry.sizes)
        tensors |= {name: part.T if entry.transposed else part for name, part in zip(entry.theirs, parts, strict=True)}
    return tensors


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.export", description="A trained model in a layout of the Hugging Face Hub."
    )
    parser.add_argument("path", type=Path, help="a run folder, or a checkpoint such as runs/FOLDER/best")
    parser.add_argument("--format", choices=layouts.FORMATS, required=True)
    parser.add_argument("--output", type=Path, help="a folder (default: export_FORMAT in the run folder)")
    args = parser.parse_args(arguments)
    output = args.output or args.path / f"export_{args.format}"
    if args.output is None and not storage.kept(args.path) and args.path.exists():
        parser.error(f"--output is needed, as {args.path} is no run folder")
    try:
        export(args.path, args.format, output)
    except (ConfigError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{relative(output)}: config.json, model.safetensors, tokenizer.json, tokenizer_config.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
