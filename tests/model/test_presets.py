"""The files in configs/model build the models they name."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from configs.schema import Config
from model import GPT

FOLDER = Path(__file__).parents[2] / "configs" / "model"
GPT2_VOCABULARY = 50257


def load(preset: str, **model) -> Config:
    values = OmegaConf.load(FOLDER / f"{preset}.yaml")
    if "@package _global_" not in (FOLDER / f"{preset}.yaml").read_text():
        values = {"model": values}
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), values, {"model": model}))


def on_meta(cfg: Config, vocab_size: int = GPT2_VOCABULARY) -> GPT:
    with torch.device("meta"):
        return GPT(cfg.model, cfg.norm, vocab_size)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("gpt2", 124_439_808), ("gpt2_medium", 354_823_168), ("gpt2_large", 774_030_080), ("gpt2_xl", 1_557_611_200)],
)
def test_gpt2_presets_have_the_published_number_of_parameters(preset, parameters):
    assert on_meta(load(preset, vocab_size=GPT2_VOCABULARY)).parameter_count() == parameters


def test_llama_is_llama_style():
    cfg = load("llama")
    model = on_meta(cfg)
    names = {name for name, _ in model.named_parameters()}
    assert cfg.norm.kind == "rmsnorm"
    assert not any("bias" in name for name in names)
    assert model.rotary is not None
    assert model.blocks[0].mlp.activation == "swiglu"
    assert model.parameter_count() == 50304 * 768 + 12 * (768 * (768 + 512) + 768 * 768 + 3 * 768 * 2048 + 2 * 768) + 768


def test_tiny_is_the_default():
    assert load("tiny").model == Config().model
    assert 1.0e6 < on_meta(load("tiny"), 2048).parameter_count() < 1.1e6
