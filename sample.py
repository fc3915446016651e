"""Text from a checkpoint.

python sample.py runs/FOLDER --prompt "ROMEO:" --tokens 200
"""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: nothing is open that would have to be closed

import torch

from configs import Config, ConfigError, machine, rules
from configs.schema import DeviceKind, NormImpl, SampleConfig
from data import Tokenizer
from model import GPT
from training import checkpoint
from training.interrupt import mute, take_any_encoding
from training.text import continue_text, encode_prompt

SEPARATOR = "\n\n---\n\n"  # between several texts


def sample(
    path: Path,
    prompt: str,
    options: SampleConfig,
    seed: int,
    device: DeviceKind = DeviceKind.auto,
    samples: int = 1,
    seen: Callable[[list[str]], object] = lambda texts: None,
) -> list[str]:
    """Texts, each of the prompt and options.tokens more.

    Args:
        path: a run folder (its newest checkpoint), or a checkpoint, such as RUN/best.
        seen: called after each token with the texts so far.

    Raises:
        ConfigError: no whole checkpoint there, or a prompt that the tokenizer can't encode.
    """
    stored = checkpoint.read(path)  # the optimizer's state stays on disk
    cfg = stored.cfg
    on = machine.inspect(device)
    if on.device == "mps":
        cfg.norm.impl = NormImpl.torch  # the same weights and the same function, without Triton

    tokenizer = Tokenizer.load(stored.path / checkpoint.TOKENIZER)
    ids = encode_prompt(tokenizer, prompt, key="--prompt")

    model = GPT(cfg.model, cfg.norm, tokenizer.vocab_size, cfg.loss, cfg.mlp)
    checkpoint.load_weights(model, stored)
    model.to(on.device)
    return continue_text(model, tokenizer, ids, options, seed, torch.device(on.device), samples, seen)


class Printer:
    """Prints one text as it grows, or several at the end. What is printed stays after Ctrl-C."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._printed = ""

    def __call__(self, texts: list[str]) -> None:
        self.texts = texts
        grown = texts[0].rstrip("\ufffd")  # of a character whose bytes are not all there
        if len(texts) == 1 and grown.startswith(self._printed):
            print(grown.removeprefix(self._printed), end="", flush=True)
            self._printed = grown

    def finish(self) -> None:
        text = SEPARATOR.join(self.texts)
        print(text.removeprefix(self._printed) if text.startswith(self._printed) else f"\n{text}", flush=True)


def whole_or_null(text: str) -> int | None:
    return None if text == "null" else int(text)


whole_or_null.__name__ = "whole number or null"  # as argparse calls it in its messages


def main(arguments: list[str] | None = None) -> int:
    take_any_encoding()
    parser = argparse.ArgumentParser(
        description="Text from a checkpoint.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("path", type=Path, help="a run folder, or a checkpoint such as runs/FOLDER/best")
    parser.add_argument(
        "--prompt", default="\n", help="the text to go on from; empty: the start of a document. The default is a newline"
    )
    parser.add_argument("--samples", type=int, default=1, help="how many texts; several are computed together")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top-k", type=whole_or_null, default=200, help="sample from the k likeliest tokens; null: from all")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument("--device", choices=[device.value for device in DeviceKind], default="auto", help="what computes it")
    args = parser.parse_args(arguments)
    options = SampleConfig(tokens=args.tokens, temperature=args.temperature, top_k=args.top_k)
    wrong = [*rules.out_of_range(Config(sample=options, seed=args.seed))]
    if wrong := wrong + ["samples: must be at least 1."] * (args.samples < 1):
        parser.error(f"--{wrong[0].removeprefix('sample.').replace('_', '-')}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printer, code = Printer(), 0
    try:
        try:
            printer(sample(args.path, args.prompt, options, args.seed, DeviceKind(args.device), args.samples, printer))
        except KeyboardInterrupt:
            code = 130
        printer.finish()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename:
            print(f"error: {error.filename}: {error.strerror}.", file=sys.stderr)
            return 2
        mute(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # else its reader wants no more
            print(f"stopped: standard output can't be written: {error.strerror}.", file=sys.stderr)
            return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
