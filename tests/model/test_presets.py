"""The files in configs/model build the models they name."""

import pytest
import torch

import configs
from model import GPT
from tests.runs import CPU

# embeddings, and of each layer q and o, k and v, the MLP and two norms; and the last norm
LLAMA = 50304 * 768 + 12 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768) + 768
GPT2 = {"": 124_439_808, "_medium": 354_823_168, "_large": 774_030_080, "_xl": 1_557_611_200}  # as published
ABOUT_GPT2 = [(preset, 50304, 120e6, 10e6) for preset in ("gemma", "olmo", "qwen")]


@pytest.mark.parametrize(
    ("preset", "vocabulary", "parameters", "within"),
    [("llama", 50304, LLAMA, 0), *((f"gpt2{size}", 50257, n, 0) for size, n in GPT2.items()), *ABOUT_GPT2],
)
def test_presets_have_the_published_number_of_parameters(preset, vocabulary, parameters, within):
    cfg = configs.load([f"model={preset}", f"model.vocab_size={vocabulary}"], on=CPU)
    with torch.device("meta"):
        model = GPT(cfg.model, cfg.norm, 50257)
    assert model.parameter_count() == pytest.approx(parameters, abs=within)
