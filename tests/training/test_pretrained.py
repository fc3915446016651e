"""init_from: weights of the Hub give the logits of `transformers`, those of a run its loss; others are refused by key."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from configs import ConfigError
from data.tokenizer import char_tokenizer
from model import GPT
from tests.runs import composed, newest, raising, read_json, train_here
from tests.training.hub_models import GPT2, LLAMA, C, V, W, gpt2, llama, logits
from training import pretrained

TOKENS = torch.randint(V, (3, C), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def hub(tmp_path):
    """Writes a model to a folder as `transformers` does, with changes of its config.json and of its tensors. Returns both."""

    def write(model, config=None, **tensors):
        folder = tmp_path / "hub"
        model.save_pretrained(folder)
        stored = read_json(folder / "config.json") | (config or {})
        (folder / "config.json").write_text(json.dumps(stored))
        file = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in (load_file(file) | tensors).items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
        return folder

    return write


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The folder of a run of a LayerNorm model with characters as tokens."""
    return train_here(tiny, tmp_path_factory.mktemp("first") / "run")[0].folder


def loaded(overrides, source, vocab_size=V):
    cfg = composed(overrides)
    torch.manual_seed(0)
    model = GPT(cfg.model, cfg.norm, vocab_size).eval()
    pretrained.load(model, str(source), char_tokenizer("abc"))
    return model


def assert_same_logits(ours, theirs, tokens=TOKENS):
    torch.testing.assert_close(logits(ours, tokens)[..., :V], logits(theirs, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("theirs", "overrides"), [(gpt2, GPT2), (llama, LLAMA)])
def test_weights_of_the_hub_give_the_logits_of_transformers(hub, theirs, overrides):
    assert_same_logits(loaded([*overrides], hub(theirs())), theirs())


@pytest.mark.parametrize("head", ["wte.weight", "lm_head.weight"])  # which the embedding is tied to
def test_openais_own_names_and_buffers_are_read(hub, head):
    folder = hub(gpt2())
    tensors = load_file(folder / "model.safetensors")
    buffers = {"h.0.attn.bias": torch.ones(1, 1, C, C), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {head: bare.pop("wte.weight")} | buffers, folder / "model.safetensors")
    assert_same_logits(loaded(GPT2, folder), gpt2())


def test_the_padding_of_the_vocabulary_hardly_changes_a_loss_far_below_zero(hub):
    theirs = gpt2()
    with torch.no_grad():
        theirs.transformer.ln_f.bias += 3.0  # a direction that all embeddings share, as in GPT-2, and logits near -100
        theirs.transformer.wte.weight -= 1.0
    model, targets = loaded(GPT2, hub(theirs)), TOKENS.roll(-1, dims=1)
    wanted = logits(theirs, TOKENS)
    excess = model(TOKENS, targets).item() - F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).item()
    assert wanted.mean() < -50 and model.vocab_size == 128
    assert -1e-4 < excess <= math.log(128 / V) + 1e-4


def test_parts_with_an_index_16_bit_weights_and_a_shorter_context_are_read(tmp_path):
    theirs = gpt2().bfloat16()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same_logits(loaded([*GPT2, "model.context=8"], tmp_path), theirs.float(), TOKENS[:, :8])


@pytest.mark.parametrize(
    ("theirs", "overrides", "config", "lines"),
    [
        (gpt2, "model.heads=2 norm.eps=1e-6", {}, ["model.heads=2: it has 4.", "norm.eps=1e-06: it has 1e-05."]),
        (gpt2, "model.bias=false", {}, ["model.bias=false: it has true."]),
        (gpt2, "model.context=32", {}, ["model.context=32: it has 16."]),
        (gpt2, "norm.kind=rmsnorm", {}, ["norm.kind=rmsnorm: it has layernorm."]),
        (gpt2, "", {"activation_function": "relu"}, ["activation_function=relu in its config.json"]),
        (llama, "model.rotary_base=10.0", {"num_key_value_heads": 4}, ["kv_heads=2: it has 4.", "base=10.0: it has 500"]),
        (llama, "", {"rope_parameters": {"rope_type": "llama3"}}, ["rope_type=llama3 in its"]),
        (llama, "", {"head_dim": 16}, ["head_dim=16 in its"]),
        (gpt2, "norm.placement=sandwich norm.weight=none", {}, ["norm.placement=sandwich: it has pre", "norm.weight=none"]),
        (gpt2, "model.embedding_scale=sqrt_width", {}, ["model.embedding_scale=sqrt_width: it has null."]),
        (gpt2, "", {"model_type": "bert"}, ["of type bert; known are gpt2 and llama"]),
    ],
)
def test_another_model_is_refused_by_key(hub, theirs, overrides, config, lines):
    with pytest.raises(ConfigError) as refused:
        loaded([*(GPT2 if theirs is gpt2 else LLAMA), *overrides.split()], hub(theirs(), config))
    assert [line for line in lines if line not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("vocabulary", "tensors", "message"),
    [
        (71, {}, "vocabulary of 70, the tokenizer one of 71"),
        (V, {"transformer.adapter": torch.ones(1)}, r"no place for: transformer\.adapter"),
        (V, {"transformer.h.1.mlp.c_fc.weight": None}, r"no tensor transformer\.h\.1\.mlp\.c_fc\.weight"),
        (V, {"lm_head.weight": torch.ones(V, W)}, r"lm_head\.weight is not transformer\.wte\.weight"),
    ],
)
def test_another_vocabulary_a_missing_tensor_and_one_too_many_are_named(hub, vocabulary, tensors, message):
    with pytest.raises(ConfigError, match=message):
        loaded(GPT2, hub(gpt2(), **tensors), vocabulary)


def test_a_source_that_is_no_model_is_named(tmp_path, run, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    shutil.copytree(newest(run), tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"damaged")
    messages = {
        tmp_path: "no checkpoint there",
        tmp_path / "damaged": "not a readable checkpoint",
        tmp_path / "new": "no checkpoint there",
        f"{run.parent.name}/rnu": f"Runs that have some: {run.parent.name}/run",  # a folder that is here is no name of the Hub
    }
    for source, message in messages.items():
        with pytest.raises(ConfigError, match=rf"init_from=\S+: .*{message}"):
            loaded(GPT2, source)


def test_a_repository_is_asked_for_its_config_and_weights_alone(hub, monkeypatch):
    asked, source = [], hub(gpt2())
    download = "huggingface_hub.snapshot_download"
    monkeypatch.setattr(download, lambda name, allow_patterns: asked.extend([name, *allow_patterns]) or str(source))
    loaded(GPT2, "owner/name")
    assert asked == ["owner/name", "config.json", "model*.safetensors", "model.safetensors.index.json"]
    monkeypatch.setattr(download, raising(OSError("no route")))
    with pytest.raises(ConfigError, match=r"init_from=owner/name: neither a folder here nor a repository.*no route"):
        loaded(GPT2, "owner/name")


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("best", ["norm.impl=torch"]),
        ("config.yaml", ["model.mlp_width=128", "model.kv_heads=2"]),  # sizes that follow from others, given
    ],
)
def test_a_run_that_begins_with_the_weights_of_another_has_its_loss_and_says_so(run, tiny, tmp_path, capsys, source, given):
    unmoved = ["optim.lr=1e-12", "optim.min_lr=0.0", "train.steps=3"]
    summary, _ = train_here([*tiny, *unmoved, f"init_from={run / source}", *given], tmp_path)
    assert summary.final.loss == pytest.approx(read_json(run / "summary.json")["final"]["loss"], rel=1e-4)
    assert f"2 layers × 32, with the weights of {run / source}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.heads=4", r"init_from=\S+: another model than this run's:\nmodel\.heads=4: it has 2\.$"),
        ("model.mlp_width=48 model.context=16", r"model\.mlp_width=48: it has 128\.\nmodel\.context=16: it has 32\."),
        ("model.vocab_size=256", r"model\.vocab_size=256: it has 64\."),
        ("tokenizer=bpe tokenizer.vocab_size=300", r"init_from=\S+: trained with another tokenizer"),
    ],
)
def test_weights_of_another_run_that_mean_something_else_are_refused(run, tiny, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        train_here([*tiny, f"init_from={run}", *change.split()], tmp_path / "second")
