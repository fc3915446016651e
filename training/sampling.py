"""Text from a model: encode a prompt, generate, decode."""

import torch

from configs import ConfigError
from configs.schema import SampleConfig
from data import Tokenizer
from model import GPT
from training.sharding import evaluated


def encode_prompt(tokenizer: Tokenizer, prompt: str, key: str = "sample.prompt") -> list[int]:
    """Raises ConfigError, with the prompt's name: it can't be encoded, or leaves the model no token to go on from."""
    try:
        ids = tokenizer.encode(prompt)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not ids:
        raise ConfigError(f"{key} has no tokens: the model needs one to go on from, such as a newline.")
    return ids


def continue_text(model: GPT, tokenizer: Tokenizer, ids: list[int], cfg: SampleConfig, seed: int, device: torch.device) -> str:
    """The text of `ids` and of cfg.tokens more; the same for the same seed. All ranks of a sharded model call it together."""
    generator = torch.Generator(device).manual_seed(seed)
    prompt = torch.tensor([ids], device=device)
    with evaluated(model):
        tokens = model.generate(prompt, cfg.tokens, cfg.temperature, cfg.top_k, generator=generator)
    return tokenizer.decode(tokens[0].tolist())
