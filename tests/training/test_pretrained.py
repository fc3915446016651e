"""Weights of the Hub's GPT-2 and Llama layouts give the logits of the published formulae; other models are refused by key."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file, save_model

import configs
from configs import ConfigError
from configs.machine import Machine
from data.tokenizer import char_tokenizer
from model import GPT
from tests.runs import train_here
from tests.training import hub_models
from training import pretrained

V, W, C, LAYERS, HEADS = 70, 32, 16, 2, 4  # the vocabulary is padded to 128
GPT2 = [f"model.layers={LAYERS}", f"model.heads={HEADS}", f"model.width={W}", f"model.context={C}"]
LLAMA = [
    *GPT2,
    *("model.kv_heads=2", "model.mlp_width=48", "model.bias=false", "model.positions=rotary", "model.activation=swiglu"),
    *("norm.kind=rmsnorm", "norm.eps=1e-6", "model.rotary_base=500.0"),
]
GPT2_JSON = {"model_type": "gpt2", "vocab_size": V, "n_layer": LAYERS, "n_head": HEADS, "n_embd": W, "n_positions": C}
LLAMA_JSON = {
    "model_type": "llama",
    "vocab_size": V,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_size": W,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": C,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def load(model, source):
    pretrained.load(model, source, char_tokenizer("abc"))


def gpt2_tensors():
    sizes = {"V": V, "W": W, "C": C, "H": 4 * W, "3": 3 * W}
    return hub_models.random_tensors(hub_models.GPT2_TOP, hub_models.GPT2_BLOCK, "h", LAYERS, sizes)


def llama_tensors():
    sizes = {"V": V, "W": W, "K": W // 2, "H": 48}
    return hub_models.random_tensors(hub_models.LLAMA_TOP, hub_models.LLAMA_BLOCK, "model.layers", LAYERS, sizes)


def model_of(overrides, vocab_size=V):
    cfg = configs.load(overrides, on=Machine("cpu"))
    torch.manual_seed(0)
    return GPT(cfg.model, cfg.norm, vocab_size).eval()


@pytest.fixture
def tokens():
    return torch.randint(V, (3, C), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("impl", ["fused", "torch"])
@pytest.mark.parametrize("prefix", ["", "transformer."])  # OpenAI's own files have none
def test_gpt2_weights_give_gpt2s_logits(tmp_path, tokens, prefix, impl):
    tensors = gpt2_tensors()
    buffers = {f"{prefix}h.0.attn.bias": torch.ones(1, 1, C, C), f"{prefix}h.0.attn.masked_bias": torch.tensor(-1e4)}
    source = write(tmp_path / "hub", {prefix + name: tensor for name, tensor in tensors.items()} | buffers, GPT2_JSON)
    model = model_of([*GPT2, f"norm.impl={impl}"])

    load(model, source)

    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[..., :V], hub_models.gpt2(tensors, tokens, HEADS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_llama_weights_give_llamas_logits(tmp_path, tokens, impl):
    tensors = llama_tensors()
    model = model_of([*LLAMA, f"norm.impl={impl}"])

    load(model, write(tmp_path / "hub", tensors, LLAMA_JSON))

    wanted = hub_models.llama(tensors, tokens, HEADS, 2, 1e-6, 500.0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[..., :V], wanted, rtol=1e-4, atol=1e-4)


def test_the_padding_of_the_vocabulary_hardly_changes_a_loss_far_below_zero(tmp_path, tokens):
    tensors = gpt2_tensors()
    tensors["ln_f.bias"] += 3.0  # a direction that all embeddings share, as in GPT-2, and logits near -100
    tensors["wte.weight"] -= 1.0
    model = model_of(GPT2)
    load(model, write(tmp_path / "hub", tensors, GPT2_JSON))
    logits = hub_models.gpt2(tensors, tokens, HEADS)
    targets = tokens.roll(-1, dims=1)

    excess = model(tokens, targets).item() - F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    assert logits.mean() < -50
    assert model.vocab_size == 128
    assert -1e-4 < excess <= math.log(128 / V) + 1e-4


def test_parts_with_an_index_16_bit_weights_and_a_shorter_context_are_read(tmp_path, tokens):
    tensors = {name: tensor.bfloat16() for name, tensor in gpt2_tensors().items()}
    source = write(tmp_path / "hub", {}, GPT2_JSON)
    (tmp_path / "hub" / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / "hub" / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = model_of([*GPT2, "model.context=8"])

    load(model, source)

    wanted = hub_models.gpt2({name: tensor.float() for name, tensor in tensors.items()}, tokens[:, :8], HEADS)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[:, :8])[..., :V], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "config", "message"),
    [
        (["model.heads=2"], {}, r"model\.heads=2: it has 4\."),
        (["norm.eps=1e-6"], {}, r"norm\.eps=1e-06: it has 1e-05\."),
        (["model.layers=3"], {}, r"model\.layers=3: it has 2\."),
        (["model.context=32"], {}, r"model\.context=32: it has 16\."),
        (["model.bias=false"], {}, r"model\.bias=false: it has true\."),
        (["model.tie_embeddings=false"], {}, r"model\.tie_embeddings=false: it has true\."),
        (["model.positions=rotary"], {}, r"model\.positions=rotary, the layout has learned\."),
        (["norm.kind=rmsnorm"], {}, r"norm\.kind=rmsnorm, the layout has layernorm\."),
        ([], {"activation_function": "relu"}, "activation_function in its config.json"),
        ([], {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx in its config.json"),
        ([], {"model_type": "bert"}, "of type bert; known are gpt2 and llama"),
        ([], {"model_type": None}, "of type None"),
    ],
)
def test_another_model_is_refused_by_key(tmp_path, overrides, config, message):
    source = write(tmp_path / "hub", gpt2_tensors(), GPT2_JSON | config)

    with pytest.raises(ConfigError, match=message):
        load(model_of([*GPT2, *overrides]), source)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 10000.0}, r"model\.rotary_base=500\.0: it has 10000\.0"),
        ({"num_key_value_heads": 4}, r"model\.kv_heads=2: it has 4"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type in its config.json"),
        ({"head_dim": 16}, "head_dim in its config.json"),
    ],
)
def test_another_llama_is_refused_by_key(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        load(model_of(LLAMA), write(tmp_path / "hub", llama_tensors(), LLAMA_JSON | config))


def test_another_vocabulary_a_missing_tensor_and_one_too_many_are_named(tmp_path):
    tensors = gpt2_tensors()
    with pytest.raises(ConfigError, match="vocabulary of 70, the tokenizer one of 71"):
        load(model_of(GPT2, vocab_size=71), write(tmp_path / "a", tensors, GPT2_JSON))
    with pytest.raises(ConfigError, match=r"has tensors that this model has no place for: transformer\.adapter"):
        load(model_of(GPT2), write(tmp_path / "b", tensors | {"adapter": torch.ones(1)}, GPT2_JSON))
    del tensors["h.1.mlp.c_fc.weight"]
    with pytest.raises(ConfigError, match=r"no tensor transformer\.h\.1\.mlp\.c_fc\.weight"):
        load(model_of(GPT2), write(tmp_path / "c", tensors, GPT2_JSON))


def test_a_folder_that_is_none_or_holds_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        load(model_of(GPT2), str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: no run of train\.py, and not a GPT-2 or Llama.*FileNotFoundError"):
        load(model_of(GPT2), str(tmp_path / "empty"))


def test_a_repository_is_asked_for_its_config_and_weights_alone(tmp_path, monkeypatch):
    asked = []
    source = write(tmp_path / "hub", gpt2_tensors(), GPT2_JSON)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.append((name, allow_patterns)) or source
    )
    load(model_of(GPT2), "owner/name")
    assert asked == [("owner/name", ["config.json", "model*.safetensors", "model.safetensors.index.json"])]

    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ConfigError, match=r"init_from=owner/name is neither a folder here nor a repository.*no route"):
        load(model_of(GPT2), "owner/name")


def test_an_embedding_that_a_file_has_under_the_heads_name_alone_is_read(tmp_path, tokens):
    class Tied(torch.nn.Module):  # as safetensors.torch.save_model keeps one of two names
        def __init__(self, weight):
            super().__init__()
            self.lm_head, self.transformer = torch.nn.Linear(W, V, bias=False), torch.nn.Module()
            self.transformer.wte = torch.nn.Embedding(V, W)
            self.lm_head.weight = self.transformer.wte.weight = torch.nn.Parameter(weight)

    tensors = {f"transformer.{name}": tensor for name, tensor in gpt2_tensors().items()}
    save_model(Tied(tensors.pop("transformer.wte.weight")), str(tmp_path / "tied.safetensors"))
    kept = load_file(tmp_path / "tied.safetensors")
    assert list(kept) == ["lm_head.weight"]
    model = model_of(GPT2)

    load(model, write(tmp_path / "hub", tensors | kept, GPT2_JSON))

    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[..., :V], hub_models.gpt2(gpt2_tensors(), tokens, HEADS), rtol=1e-4, atol=1e-4)


def test_a_head_that_is_tied_by_config_and_another_by_its_numbers_is_refused(tmp_path):
    tensors = gpt2_tensors()
    source = write(tmp_path / "hub", tensors | {"lm_head.weight": tensors["wte.weight"] + 1}, GPT2_JSON)

    with pytest.raises(ConfigError, match=r"ties its embeddings.*lm_head\.weight is not transformer\.wte\.weight"):
        load(model_of(GPT2), source)


# ---- a run's own weights -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of a LayerNorm model with characters as tokens, and its overrides."""
    folder = tmp_path_factory.mktemp("first") / "run"
    train_here(tiny, folder)
    return folder, tiny


UNMOVED = ["optim.lr=1e-12", "optim.min_lr=0.0", "train.steps=3"]


def final_loss(folder):
    return json.loads((folder / "summary.json").read_text())["final"]["loss"]


def test_a_run_that_begins_with_the_weights_of_another_begins_with_its_loss_and_says_so(run, tmp_path, capsys):
    folder, overrides = run
    for impl, source in (("fused", folder), ("torch", folder / "best")):
        summary, _ = train_here([*overrides, *UNMOVED, f"init_from={source}", f"norm.impl={impl}"], tmp_path / impl)
        assert summary.final.loss == pytest.approx(final_loss(folder), rel=1e-4)
        assert f"2 layers × 32, with the weights of {source}\n" in capsys.readouterr().out
    weights = load_file(tmp_path / "fused" / "last" / "model.safetensors")
    for name, tensor in load_file(folder / "last" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.heads=4", r"init_from=\S+: another model than this run's:\nmodel\.heads=4: it has 2\.$"),
        ("norm.kind=rmsnorm", r"norm\.kind=rmsnorm: it has layernorm\."),
        ("model.mlp_width=48", r"model\.mlp_width=48: it has 128\."),
        ("model.kv_heads=1", r"model\.kv_heads=1: it has 2\."),
        ("model.context=16", r"model\.context=16: it has 32\."),
        ("model.vocab_size=256", r"(?s)init_from=\S+: the weights of .* do not fit this model: .*size mismatch"),
        ("tokenizer=bpe", r"init_from=\S+: trained with another tokenizer"),
    ],
)
def test_weights_of_another_run_that_mean_something_else_are_refused(run, tmp_path, change, message):
    folder, overrides = run
    more = ["tokenizer.vocab_size=300"] if change == "tokenizer=bpe" else []
    with pytest.raises(ConfigError, match=message):
        train_here([*overrides, f"init_from={folder}", change, *more], tmp_path / "second")


def test_sizes_that_are_given_and_those_that_follow_from_others_are_the_same_model(run, tmp_path):
    folder, overrides = run
    given = ["model.mlp_width=128", "model.kv_heads=2"]
    summary, _ = train_here([*overrides, *UNMOVED, f"init_from={folder}", *given], tmp_path)
    assert summary.final.loss == pytest.approx(final_loss(folder), rel=1e-4)


@pytest.mark.parametrize("file", ["config.yaml", "last/model.safetensors"])
def test_a_file_of_a_run_stands_for_its_folder(run, tmp_path, file):
    folder, overrides = run
    summary, _ = train_here([*overrides, *UNMOVED, f"init_from={folder / file}"], tmp_path)
    assert summary.final.loss == pytest.approx(final_loss(folder), rel=1e-4)


@pytest.mark.parametrize("beside", ["checkpoints", "config.yaml", "SHA256SUMS"])
def test_a_gpt2_may_have_files_beside_it_that_are_called_as_those_of_a_run(tmp_path, beside):
    source = write(tmp_path / "hub", gpt2_tensors(), GPT2_JSON)
    (tmp_path / "hub" / beside).mkdir()
    model = model_of(GPT2)
    load(model, source)
    assert torch.equal(model.state_dict()["positions.weight"], gpt2_tensors()["wpe.weight"])


@pytest.mark.parametrize("left", ["checkpoints", "config.yaml"])
def test_a_run_before_its_first_checkpoint_is_refused(tmp_path, left):
    (tmp_path / left).mkdir()
    with pytest.raises(ConfigError, match=r"init_from=\S+: .*no checkpoints in this folder"):
        load(model_of(GPT2), str(tmp_path))


def test_a_damaged_checkpoint_is_refused(run, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(run[0] / "last", damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(200)
        file.write(b"damaged")
    with pytest.raises(ConfigError, match=r"init_from=\S+: .*not a readable checkpoint"):
        load(model_of(GPT2), str(damaged))


def test_a_name_in_a_folder_that_is_here_is_not_asked_of_the_hub_and_runs_beside_it_are_told(run, monkeypatch):
    folder = run[0].parent
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ConfigError, match=rf"init_from={folder.name}/rnu: no such folder\. Latest runs beside it: run\."):
        load(model_of(GPT2), f"{folder.name}/rnu")
