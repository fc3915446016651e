"""Models of the Hub: their weights give the logits of `transformers`, ours come back exported, others are refused by key."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import configs
from configs import ConfigError
from data import Tokenizer
from data.tokenizer import char_tokenizer, train_bpe
from model import GPT
from tests.runs import composed, no_space, raising, read_json, train_here
from training import export, storage
from training.checkpoint import TrainState
from training.optimizer import adamw

transformers = pytest.importorskip("transformers", minversion="5.20")

V, W, C = 70, 32, 16  # our vocabulary is padded to 128
GPT2 = ["model.layers=2", "model.heads=4", f"model.width={W}", f"model.context={C}"]
LLAMA = [*GPT2, "model.kv_heads=2", "model.mlp_width=48", "model.bias=false", "model.positions=rotary"]
LLAMA += ["model.rotary_base=500.0", "model.activation=swiglu", "norm.kind=rmsnorm", "norm.eps=1e-6"]
UNTIED = "model.tie_embeddings=false"
GPT2_WITHOUT_BIASES = [*GPT2, UNTIED, "model.bias=false", "model.mlp_width=48", "model.attention_dropout=0.2"]
TOKENS = torch.randint(V, (3, C), generator=torch.Generator().manual_seed(1))


def gpt2():
    return _random(transformers.GPT2Config(vocab_size=V, n_layer=2, n_head=4, n_embd=W, n_positions=C))


def llama():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": C}
    more = {"intermediate_size": 48, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    return _random(transformers.LlamaConfig(vocab_size=V, hidden_size=W, rope_parameters=rope, **sizes, **more))


def _random(config):
    """With weights so large that a wrong layout shows."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or ("ln_" in name and name.endswith("weight"))
            parameter.copy_(is_norm + 0.2 * torch.randn_like(parameter))
    return model


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        found = model.eval()(tokens)
    return getattr(found, "logits", found)


def assert_same_logits(ours, theirs, tokens=TOKENS):
    torch.testing.assert_close(logits(ours, tokens)[..., :V], logits(theirs, tokens), rtol=1e-4, atol=1e-4)


@pytest.fixture
def hub(tmp_path):
    """Writes a model to a folder as `transformers` does, with changes of its config.json and of its tensors."""

    def write(model, config=None, **tensors):
        folder = tmp_path / "hub"
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | (config or {})))
        file = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
        return folder

    return write


def loaded(overrides, source, vocab_size=V):
    cfg = composed(overrides)
    model = GPT(cfg.model, cfg.norm, vocab_size).eval()
    export.load(model, str(source), char_tokenizer("abc"))
    return model


# ---- weights to begin with ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("theirs", "overrides"), [(gpt2, GPT2), (llama, LLAMA)])
def test_weights_of_the_hub_give_the_logits_of_transformers(hub, monkeypatch, theirs, overrides):
    source, asked = hub(theirs()), []
    assert_same_logits(loaded(overrides, source), theirs())
    download = "huggingface_hub.snapshot_download"
    monkeypatch.setattr(download, lambda name, allow_patterns: asked.append(name) or str(source))
    assert_same_logits(loaded(overrides, "owner/name"), theirs())
    monkeypatch.setattr(download, raising(OSError("no route")))
    with pytest.raises(ConfigError, match=r"init_from=owner/name: no route"):
        loaded(overrides, "owner/name")
    assert asked == ["owner/name"]


@pytest.mark.parametrize("head", ["wte.weight", "lm_head.weight"])  # which the embedding is tied to
def test_openais_own_names_buffers_16_bit_weights_and_a_shorter_context_are_read(hub, head):
    theirs = gpt2().bfloat16()
    folder = hub(theirs)
    buffers = {"h.0.attn.bias": torch.ones(1, 1, C, C), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    parts = bare | {head: bare.pop("wte.weight")} | buffers
    for i, names in enumerate((list(parts)[::2], list(parts)[1::2])):
        save_file({name: parts[name] for name in names}, folder / f"model-0000{i}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    assert_same_logits(loaded([*GPT2, "model.context=8"], folder), theirs.float(), TOKENS[:, :8])


def test_the_padding_of_the_vocabulary_hardly_changes_a_loss_far_below_zero(hub):
    theirs = gpt2()
    with torch.no_grad():
        theirs.transformer.ln_f.bias += 3.0  # a direction that all embeddings share, as in GPT-2, and logits near -100
        theirs.transformer.wte.weight -= 1.0
    model, targets, wanted = loaded(GPT2, hub(theirs)), TOKENS.roll(-1, dims=1), logits(theirs)
    excess = model(TOKENS, targets).item() - F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).item()
    assert wanted.mean() < -50 and -1e-4 < excess <= math.log(128 / V) + 1e-4


@pytest.mark.parametrize(
    ("theirs", "overrides", "changes", "message"),
    [
        (gpt2, "model.heads=2 norm.eps=1e-6", {}, r"norm\.eps=1e-06: it has 1e-05\.\n(.|\n)*model\.heads=2: it has 4\."),
        (gpt2, "model.context=32", {}, r"model\.context=32: it has 16\."),
        (gpt2, "", {"config": {"activation_function": "relu"}}, "activation_function=relu in its config.json"),
        (llama, "", {"config": {"rope_parameters": {"rope_type": "llama3"}}}, "rope_type=llama3 in its"),
        (gpt2, "tokenizer.vocab_size=300", {}, "vocabulary of 70, the tokenizer one of 71"),
        (gpt2, "", {"transformer.adapter": torch.ones(1)}, r"no place for: transformer\.adapter"),
        (gpt2, "", {"transformer.h.1.mlp.c_fc.weight": None}, r"it has no 'transformer\.h\.1\.mlp\.c_fc\.weight'"),
    ],
)
def test_another_model_is_refused_by_key(hub, theirs, overrides, changes, message):
    base, size = (GPT2 if theirs is gpt2 else LLAMA), 71 if "71" in message else V
    with pytest.raises(ConfigError, match=message):
        loaded([*base, *overrides.split()], hub(theirs(), **changes), size)


def test_a_run_that_begins_with_the_weights_of_another_has_its_loss_and_says_so(tiny, tmp_path, capsys):
    run = train_here([*tiny, "train.steps=10"], tmp_path / "first")[0]
    unmoved = ["optim.lr=1e-12", "optim.min_lr=0.0", "train.steps=3", "norm.impl=torch"]
    summary, _ = train_here([*tiny, *unmoved, f"init_from={run.folder}/best"], tmp_path / "second")
    assert summary.final.loss == pytest.approx(run.final.loss, rel=1e-4)
    assert f"2 layers × 32, with the weights of {run.folder}/best\n" in capsys.readouterr().out
    for change, message in (
        ("model.mlp_width=48 model.context=16", r"model\.mlp_width=48: it has 128\.\nmodel\.context=16: it has 32\."),
        ("tokenizer=bpe tokenizer.vocab_size=300", r"init_from=\S+: trained with another tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_here([*tiny, f"init_from={run.folder}", *change.split()], tmp_path / "third")


# ---- export ------------------------------------------------------------------------------------------------------------------


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
    storage.commit(run, 1, state.parts(configs.to_dict(cfg)))
    return model.eval()


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [("gpt2", GPT2), ("gpt2", GPT2_WITHOUT_BIASES), ("llama", LLAMA), ("llama", [*LLAMA, UNTIED, "model.bias=true"])],
)
def test_an_exported_model_gives_its_logits_in_transformers_and_comes_back_bit_for_bit(tmp_path, tokenizer, layout, overrides):
    model, rows = trained(tmp_path, [*overrides, "model.dropout=0.1"], tokenizer), tokenizer.vocab_size
    assert export.main([str(tmp_path), "--format", layout]) == 0
    out = tmp_path / f"export_{layout}"
    tokens = torch.randint(rows, (3, 16), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(model, tokens)[..., :rows], logits(theirs, tokens), rtol=1e-4, atol=1e-4)
    assert Tokenizer.load(out / "tokenizer.json").encode("the night") == tokenizer.encode("the night")
    if overrides is GPT2_WITHOUT_BIASES:
        rates = [getattr(theirs.config, f"{name}_pdrop") for name in ("embd", "resid", "attn")]
        assert rates == [0.1, 0.1, 0.2]
        return  # GPT-2 has biases, here zeros, which this model has no place for
    other = GPT(model.cfg, model.norm, rows)
    export.load(other, str(out), tokenizer)
    ours = model.state_dict()
    for name, tensor in other.state_dict().items():
        kept = rows if name in ("embedding.weight", "head.weight") else None  # what follows is padding
        assert torch.equal(tensor[:kept], ours[name][:kept]), name


@pytest.mark.parametrize(
    ("layout", "overrides", "keys"),
    [
        ("gpt2", [*LLAMA, "model.kv_heads=2"], ["norm.kind=rmsnorm", "model.positions=rotary", "model.activation=swiglu"]),
        ("llama", [*LLAMA, "model.block=parallel"], ["model.block=parallel"]),
    ],
)
def test_what_a_layout_can_not_express_is_refused_by_key(tmp_path, tokenizer, capsys, layout, overrides, keys):
    trained(tmp_path, overrides, tokenizer)
    assert export.main([str(tmp_path), "--format", layout, "--output", str(tmp_path / "out")]) == 2
    _, *rest = capsys.readouterr().err.splitlines()
    assert len(rest) == len(keys) and all(line.startswith(key) for line, key in zip(rest, keys, strict=True))
    assert not (tmp_path / "out").exists()


def test_an_export_never_writes_into_a_folder_with_files_and_leaves_nothing_of_itself_on_a_full_disk(
    tmp_path, tokenizer, capsys, monkeypatch
):
    run = tmp_path / "run"
    trained(run, GPT2, tokenizer)
    [kept] = storage.checkpoints(run)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("mine")
    for output in (kept, run, tmp_path / "theirs", tmp_path / "theirs" / "config.json"):
        assert export.main([str(run), "--format", "gpt2", "--output", str(output)]) == 2
        assert f"--output {output}: " in capsys.readouterr().err
    storage.verify(kept)
    assert (tmp_path / "theirs" / "config.json").read_text() == "mine"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_space)  # the second of its files
        assert export.main([str(run), "--format", "gpt2"]) == 2
    assert "export_gpt2 can't be written: No space left on device" in capsys.readouterr().err
    assert {path.name for path in run.iterdir()} == {storage.FOLDER}
    (run / "export_gpt2").mkdir()
    assert export.main([str(kept), "--format", "gpt2"]) == 0 and (run / "export_gpt2" / "config.json").is_file()
