"""The files in configs/model build the models they name."""

import pytest
import torch

import configs
from model import GPT
from tests.runs import CPU

# of the llama preset: embeddings, and of each layer q and o, k and v, the MLP and two norms; and the last norm
LLAMA = 50304 * 768 + 12 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768) + 768
GPT2 = {"": 124_439_808, "_medium": 354_823_168, "_large": 774_030_080, "_xl": 1_557_611_200}  # as published


@pytest.mark.parametrize("preset", ["gemma", "olmo", "qwen"])
def test_presets_of_other_blocks_have_about_124_million_parameters(preset):
    cfg = configs.load([f"model={preset}", "model.vocab_size=50304"], on=CPU)
    with torch.device("meta"):
        model = GPT(cfg.model, cfg.norm, 50257)
    assert 110e6 < model.parameter_count() < 130e6


@pytest.mark.parametrize(("preset", "parameters"), [("llama", LLAMA), *((f"gpt2{size}", n) for size, n in GPT2.items())])
def test_presets_have_the_published_number_of_parameters(preset, parameters):
    cfg = configs.load([f"model={preset}", f"model.vocab_size={50304 if preset == 'llama' else 50257}"], on=CPU)
    with torch.device("meta"):
        model = GPT(cfg.model, cfg.norm, 50257)
    assert model.parameter_count() == parameters and (model.norm.kind == "rmsnorm") == (preset == "llama")
