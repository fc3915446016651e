"""Exported models: `transformers`' formulae give our logits, the way back gives our bits, and what has no place is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

import configs
from configs import ConfigError
from configs.machine import Machine
from data import Tokenizer
from data.tokenizer import train_bpe
from model import GPT
from tests.training import hub_models
from training import export, pretrained, storage
from training.checkpoint import TrainState
from training.step import adamw

SMALL = ["model.layers=2", "model.heads=4", "model.width=32", "model.context=16"]
LLAMA = [
    *SMALL,
    "model.kv_heads=2",
    "model.positions=rotary",
    "model.activation=swiglu",
    "norm.kind=rmsnorm",
    "model.bias=false",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["the king and the queen of night " * 20], 280)


def trained(run, overrides, tokenizer):
    """A run's checkpoint with weights far from their initial values, and its model."""
    cfg = configs.load(overrides, on=Machine("cpu"))
    torch.manual_seed(3)
    model = GPT(cfg.model, cfg.norm, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", enabled=False), tokenizer.to_json())
    storage.commit(run, 1, state.parts(configs.to_dict(cfg), copied=False))
    return model.eval()


def tokens_below(vocab_size):
    return torch.randint(vocab_size, (3, 16), generator=torch.Generator().manual_seed(1))


CASES = {
    "gpt2": ("gpt2", SMALL),
    "gpt2, untied, no biases, narrow MLP": (
        "gpt2",
        [*SMALL, "model.tie_embeddings=false", "model.bias=false", "model.mlp_width=48"],
    ),
    "llama": ("llama", LLAMA),
    "llama, untied, biases": ("llama", [*LLAMA, "model.tie_embeddings=false", "model.bias=true"]),
}


@pytest.mark.parametrize(("layout", "overrides"), CASES.values(), ids=CASES.keys())
def test_the_published_formulae_on_an_exported_model_give_its_logits(tmp_path, tokenizer, layout, overrides):
    model = trained(tmp_path, overrides, tokenizer)

    assert export.main([str(tmp_path), "--format", layout]) == 0

    out = tmp_path / f"export_{layout}"
    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    tokens = tokens_below(tokenizer.vocab_size)
    if layout == "gpt2":
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        wanted = hub_models.gpt2(tensors, tokens, config["n_head"], config["layer_norm_epsilon"])
    else:
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        wanted = hub_models.llama(tensors, tokens, *heads, config["rms_norm_eps"], config["rope_theta"])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[..., : tokenizer.vocab_size], wanted, rtol=1e-4, atol=1e-4)
    assert config["vocab_size"] == wanted.shape[-1] == tokenizer.vocab_size
    assert Tokenizer.load(out / "tokenizer.json").encode("the night") == tokenizer.encode("the night")


@pytest.mark.parametrize(("layout", "overrides"), [CASES["gpt2"], CASES["llama"], CASES["llama, untied, biases"]])
def test_what_is_exported_comes_back_bit_for_bit(tmp_path, tokenizer, layout, overrides):
    model = trained(tmp_path, overrides, tokenizer)
    export.export(tmp_path, layout, tmp_path / "out")
    other = GPT(model.cfg, model.norm, tokenizer.vocab_size)

    pretrained.load(other, str(tmp_path / "out"), tokenizer)

    rows = tokenizer.vocab_size  # below them is padding
    for name, tensor in other.state_dict().items():
        ours = model.state_dict()[name]
        if name in ("embedding.weight", "head.weight"):
            tensor, ours = tensor[:rows], ours[:rows]
        assert torch.equal(tensor, ours), name


@pytest.mark.parametrize(
    ("layout", "overrides", "keys"),
    [
        ("gpt2", LLAMA, ["model.positions=rotary", "model.activation=swiglu", "norm.kind=rmsnorm", "model.kv_heads=2"]),
        ("gpt2", [*SMALL, "model.qk_norm=true", "model.block=parallel"], ["model.qk_norm=true", "model.block=parallel"]),
        ("llama", SMALL, ["model.positions=learned", "model.activation=gelu", "norm.kind=layernorm"]),
        ("llama", [*LLAMA, "model.qk_norm=true"], ["model.qk_norm=true"]),
    ],
)
def test_what_a_layout_can_not_express_is_refused_by_key(tmp_path, tokenizer, layout, overrides, keys):
    trained(tmp_path, overrides, tokenizer)

    with pytest.raises(ConfigError) as error:
        export.export(tmp_path, layout, tmp_path / "out")
    first, *rest = str(error.value).splitlines()
    assert f"can't be written in the layout {layout}" in first
    assert sorted(line.partition(",")[0] for line in rest) == sorted(keys)
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_message_and_code_2(tmp_path, tokenizer, capsys):
    assert export.main([str(tmp_path / "none"), "--format", "gpt2"]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    trained(tmp_path, SMALL, tokenizer)
    (tmp_path / "file").write_text("")
    assert export.main([str(tmp_path), "--format", "gpt2", "--output", str(tmp_path / "file" / "out")]) == 2
    assert "can't be written: Not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export.main(
            [str(storage.checkpoints(tmp_path)[0]), "--format", "gpt2"]
        )  # into a checkpoint, which is then no longer whole
    assert "--output is needed" in capsys.readouterr().err
