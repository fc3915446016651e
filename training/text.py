"""Text that a model writes: the prompt as tokens, and its continuation."""

from collections.abc import Callable

import torch

from configs import ConfigError
from configs.schema import SampleConfig
from data import Tokenizer
from model import GPT
from training.sharding import forward_only


def encode_prompt(tokenizer: Tokenizer, prompt: str, key: str = "sample.prompt") -> list[int]:
    """The token ids of a prompt. An empty one begins a document.

    Raises:
        ConfigError: the prompt, which the message calls `key`, can't be encoded, or has no token.
    """
    try:
        prompt.encode()  # bytes of a command line that are no UTF-8
        ids = tokenizer.encode(prompt) if prompt else tokenizer.separator
    except UnicodeEncodeError:
        raise ConfigError(f"{key}: is not UTF-8 text.") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not ids:
        raise ConfigError(f"{key} has no tokens: the model needs one to go on from, such as a newline.")
    return ids


def continue_text(
    model: GPT,
    tokenizer: Tokenizer,
    ids: list[int],
    cfg: SampleConfig,
    seed: int,
    device: torch.device,
    samples: int = 1,
    seen: Callable[[list[str]], object] = lambda texts: None,
) -> list[str]:
    """Texts of `ids` and of cfg.tokens more; the same for the same seed. All ranks of a sharded model call it together.

    Ends of documents are shown as their token. `seen` is called with the texts so far after each token.
    """
    generator = torch.Generator(device).manual_seed(seed)
    begin = tokenizer.decode(ids, skip_special=False) if ids == tokenizer.separator else ""  # of a document: not shown

    def texts(tokens: torch.Tensor) -> list[str]:
        return [tokenizer.decode(row, skip_special=False).removeprefix(begin) for row in tokens.tolist()]

    with forward_only(model):
        prompt = torch.tensor([ids] * samples, device=device)
        tokens = model.generate(
            prompt, cfg.tokens, cfg.temperature, cfg.top_k, generator=generator, seen=lambda tokens: seen(texts(tokens))
        )
    return texts(tokens)
