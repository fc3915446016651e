"""The files in configs/model build the models they name."""

import pytest
import torch

import configs
from model import GPT
from tests.runs import CPU

# of the llama preset: embeddings, and of each layer q and o, k and v, the MLP and two norms; and the last norm
LLAMA = 50304 * 768 + 12 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768) + 768
PRESETS = {
    "gpt2": (50257, 124_439_808),  # as published
    "gpt2_medium": (50257, 354_823_168),
    "gpt2_large": (50257, 774_030_080),
    "gpt2_xl": (50257, 1_557_611_200),
    "llama": (50304, LLAMA),
}


@pytest.mark.parametrize(("preset", "vocabulary", "parameters"), [(name, *sizes) for name, sizes in PRESETS.items()])
def test_presets_have_the_published_number_of_parameters(preset, vocabulary, parameters):
    cfg = configs.load([f"model={preset}", f"model.vocab_size={vocabulary}"], on=CPU)
    with torch.device("meta"):
        model = GPT(cfg.model, cfg.norm, 50257)
    assert model.parameter_count() == parameters
    if preset == "llama":
        assert model.norm.kind == "rmsnorm" and model.rotary is not None and model.blocks[0].mlp.activation == "swiglu"
