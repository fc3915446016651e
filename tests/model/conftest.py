"""Small models for the tests of this folder."""

from collections.abc import Callable

import pytest
import torch

from configs.schema import ModelConfig, NormConfig
from model import GPT

VOCAB = 60  # of an imagined tokenizer; padded to 64 by the model


@pytest.fixture
def device() -> torch.device:
    """The GPU, and its kernels; without one the CPU, and the PyTorch reference."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def build() -> Callable[..., GPT]:
    """build(norm_impl="torch", layers=3, ...): a model with the same initial values at every call. Keys are of
    ModelConfig, or of NormConfig with a `norm_` in front."""

    def build(**options) -> GPT:
        norm = {key.removeprefix("norm_"): value for key, value in options.items() if key.startswith("norm_")}
        sizes = {"layers": 2, "heads": 4, "width": 32, "context": 16}
        model = {key: value for key, value in options.items() if not key.startswith("norm_")}
        torch.manual_seed(0)
        return GPT(ModelConfig(**sizes | model), NormConfig(**norm), VOCAB)

    return build


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [4, 12]."""
    tokens = torch.randint(VOCAB, (4, 13), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]
