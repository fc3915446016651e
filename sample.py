"""Text from a checkpoint.

python sample.py runs/FOLDER --prompt "ROMEO:" --tokens 200
"""

import argparse
import math
import signal
import sys
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: nothing is open that would have to be closed

import torch

import configs
from configs import ConfigError, machine
from configs.schema import Device, NormImpl, SampleConfig
from data import Tokenizer
from model import GPT
from training import checkpoint
from training.console import mute, take_any_encoding
from training.evaluation import continue_text, encode_prompt


def sample(
    path: Path, prompt: str, tokens: int, temperature: float, top_k: int | None, seed: int, device: Device = Device.auto
) -> str:
    """The prompt and `tokens` more.

    Args:
        path: a run folder (its newest checkpoint), or a checkpoint, such as a run folder's link `best`.

    Raises:
        ConfigError: no whole checkpoint there, or a prompt that the tokenizer can't encode.
    """
    stored = checkpoint.read(path)  # the optimizer's state stays on disk
    cfg = configs.from_dict(stored.config)
    on = machine.inspect(device)
    if on.device == "mps":
        cfg.norm.impl = NormImpl.torch  # the same weights and the same function, without Triton

    tokenizer = Tokenizer.load(stored.path / checkpoint.TOKENIZER)
    ids = encode_prompt(tokenizer, prompt, key="--prompt")

    model = GPT(cfg.model, cfg.norm, tokenizer.vocab_size, cfg.loss)
    checkpoint.load_weights(model, stored)
    model.to(on.device)
    options = SampleConfig(tokens=tokens, temperature=temperature, top_k=top_k)
    return continue_text(model, tokenizer, ids, options, seed, torch.device(on.device))


def whole_or_null(text: str) -> int | None:
    return None if text == "null" else int(text)


whole_or_null.__name__ = "whole number or null"  # as argparse calls it in its messages


def main(arguments: list[str] | None = None) -> int:
    take_any_encoding()
    parser = argparse.ArgumentParser(
        description="Text from a checkpoint.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run folder, or a checkpoint such as runs/FOLDER/best")
    parser.add_argument("--prompt", default="\n", help="the text to go on from (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=whole_or_null, default=200, help="sample from the k likeliest tokens; null: from all")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument("--device", choices=[device.value for device in Device], default="auto", help="what computes it")
    args = parser.parse_args(arguments)
    for name in ("tokens", "temperature"):
        if getattr(args, name) < 0:
            parser.error(f"--{name} must be at least 0, got {getattr(args, name)}")
    if args.top_k is not None and args.top_k < 1:
        parser.error(f"--top-k must be at least 1, or null to sample from all tokens, got {args.top_k}")
    if not math.isfinite(args.temperature):
        parser.error(f"--temperature must be finite, got {args.temperature}")
    if not -(2**63) <= args.seed < 2**64:
        parser.error(f"--seed must be at least -2**63 and less than 2**64, got {args.seed}")
    try:
        text = sample(args.path, args.prompt, args.tokens, args.temperature, args.top_k, args.seed, Device(args.device))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except OSError as error:
        mute(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # else its reader wants no more
            print(f"stopped: standard output can't be written: {error.strerror}.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
