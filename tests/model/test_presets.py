"""The files in configs/model build the models they name."""

import pytest
import torch

import configs
from configs.schema import Config
from model import GPT
from tests.runs import CPU


def on_meta(*overrides: str, vocab_size: int = 50257) -> GPT:
    cfg = configs.load(overrides, on=CPU)
    with torch.device("meta"):
        return GPT(cfg.model, cfg.norm, vocab_size)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("gpt2", 124_439_808), ("gpt2_medium", 354_823_168), ("gpt2_large", 774_030_080), ("gpt2_xl", 1_557_611_200)],
)
def test_gpt2_presets_have_the_published_number_of_parameters(preset, parameters):
    assert on_meta(f"model={preset}", "model.vocab_size=50257").parameter_count() == parameters


def test_llama_is_llama_style():
    model = on_meta("model=llama")
    assert model.norm.kind == "rmsnorm" and model.rotary is not None and model.blocks[0].mlp.activation == "swiglu"
    assert not any("bias" in name for name, _ in model.named_parameters())
    assert model.parameter_count() == 50304 * 768 + 12 * (768 * (768 + 512) + 768 * 768 + 3 * 768 * 2048 + 2 * 768) + 768


def test_tiny_is_the_default():
    model = on_meta("model=tiny", vocab_size=2048)
    assert model.cfg == Config().model and 1.0e6 < model.parameter_count() < 1.1e6
