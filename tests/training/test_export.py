"""Exported models give their logits in `transformers`, come back bit for bit, and what a layout can't express is refused."""

import pytest
import torch

import configs
from configs import ConfigError
from data import Tokenizer
from data.tokenizer import train_bpe
from model import GPT
from tests.runs import composed
from tests.training.hub_models import GPT2, LLAMA, logits, transformers
from training import checkpoint, export, pretrained, storage
from training.checkpoint import TrainState
from training.optimizer import adamw

UNTIED = "model.tie_embeddings=false"
GPT2_WITHOUT_BIASES = [*GPT2, UNTIED, "model.bias=false", "model.mlp_width=48", "model.attention_dropout=0.2"]
CASES = [("gpt2", GPT2), ("gpt2", GPT2_WITHOUT_BIASES), ("llama", LLAMA), ("llama", [*LLAMA, UNTIED, "model.bias=true"])]


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["the king and the queen of night " * 20], 280)


def trained(run, overrides, tokenizer):
    """A run's checkpoint with weights far from their initial values, and its model."""
    cfg = composed(overrides)
    torch.manual_seed(3)
    model = GPT(cfg.model, cfg.norm, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", enabled=False), tokenizer.to_json())
    storage.commit(run, 1, state.parts(configs.to_dict(cfg), copied=False))
    return model.eval()


@pytest.mark.parametrize(("layout", "overrides"), CASES)
def test_an_exported_model_gives_its_logits_in_transformers_and_comes_back_bit_for_bit(tmp_path, tokenizer, layout, overrides):
    model, rows = trained(tmp_path, [*overrides, "model.dropout=0.1"], tokenizer), tokenizer.vocab_size
    assert export.main([str(tmp_path), "--format", layout]) == 0
    out = tmp_path / f"export_{layout}"
    tokens = torch.randint(rows, (3, 16), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(model, tokens)[..., :rows], logits(theirs, tokens), rtol=1e-4, atol=1e-4)
    assert theirs.config.vocab_size == rows
    assert Tokenizer.load(out / "tokenizer.json").encode("the night") == tokenizer.encode("the night")
    if layout == "gpt2":
        rates = [getattr(theirs.config, f"{name}_pdrop") for name in ("embd", "resid", "attn")]
        assert rates == [0.1, 0.1, 0.1 if overrides is GPT2 else 0.2]
    if overrides is GPT2_WITHOUT_BIASES:
        return  # GPT-2 has biases, here zeros, which this model has no place for
    other = GPT(model.cfg, model.norm, rows)
    pretrained.load(other, str(out), tokenizer)
    ours = model.state_dict()
    for name, tensor in other.state_dict().items():
        kept = rows if name in ("embedding.weight", "head.weight") else None  # what follows is padding
        assert torch.equal(tensor[:kept], ours[name][:kept]), name


@pytest.mark.parametrize(
    ("layout", "overrides", "keys"),
    [
        ("gpt2", LLAMA, ["model.positions=rotary", "model.activation=swiglu", "norm.kind=rmsnorm"]),
        ("gpt2", [*GPT2, "model.kv_heads=2"], ["model.kv_heads=2"]),
        ("llama", [*GPT2, "model.qk_norm=true"], ["model.positions", "model.activation", "norm.kind", "model.qk_norm=true"]),
        ("llama", [*LLAMA, "model.block=parallel"], ["model.block=parallel"]),
    ],
)
def test_what_a_layout_can_not_express_is_refused_by_key(tmp_path, tokenizer, layout, overrides, keys):
    trained(tmp_path, overrides, tokenizer)
    with pytest.raises(ConfigError) as error:
        export.export(tmp_path, layout, tmp_path / "out")
    _, *rest = str(error.value).splitlines()
    assert len(rest) == len(keys) and all(any(line.startswith(key) for line in rest) for key in keys)
    assert not (tmp_path / "out").exists()


def test_mistakes_are_one_message_and_code_2(tmp_path, tokenizer, capsys):
    assert export.main([str(tmp_path / "none"), "--format", "gpt2"]) == 2
    assert "no checkpoint there" in capsys.readouterr().err
    trained(tmp_path, GPT2, tokenizer)
    (tmp_path / "file").write_text("")
    assert export.main([str(tmp_path), "--format", "gpt2", "--output", str(tmp_path / "file" / "out")]) == 2
    assert "can't be written: Not a directory" in capsys.readouterr().err


def test_an_export_never_writes_into_a_run_or_a_checkpoint(tmp_path, tokenizer, capsys):
    run = tmp_path / "run"
    trained(run, GPT2, tokenizer)
    [kept] = storage.checkpoints(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(kept)
    for output in (kept, run, tmp_path / "link"):
        assert export.main([str(run), "--format", "gpt2", "--output", str(output)]) == 2
        assert "Name a new folder" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert export.main([str(kept), "--format", "gpt2"]) == 0 and (run / "export_gpt2" / "config.json").is_file()


def test_a_checkpoint_is_found_by_all_its_names_and_what_is_none_is_named(tmp_path, tokenizer):
    runs, run = tmp_path / "runs", tmp_path / "runs" / "a"
    trained(run, GPT2, tokenizer)
    (found,) = storage.checkpoints(run)
    (found / "Thumbs.db").write_bytes(b"of a file manager")
    (run / "metrics.jsonl").write_text('{"step": 1, "val/loss": 3.0}\n')
    for name in (run, found, found.parent, found / "model.safetensors", run / "last", run / "best"):
        assert checkpoint.read(name).path == found
    cfg = composed(GPT2)
    model = GPT(cfg.model, cfg.norm, tokenizer.vocab_size)
    pretrained.load(model, str(found.parent), tokenizer)
    (tmp_path / "old.pt").write_bytes(b"")
    (run / "metrics.jsonl").unlink()
    for name, message in {
        runs: r"runs: no checkpoint there. Runs that have some: \S+/runs/a\.",
        runs / "b": r"runs/b: no checkpoint there. Runs that have some: \S+/runs/a\.",
        run / "best": "no checkpoint of this run was evaluated",
        tmp_path / "old.pt": "no checkpoint there",
    }.items():
        with pytest.raises(ConfigError, match=message):
            checkpoint.read(name)
