"""replace_loss and restore_loss on models of transformers."""

import pytest
import torch
from torch import nn

from ops import adopt, replace_loss, restore_loss
from ops.adopting.loss import FusedCausalLoss

pytestmark = pytest.mark.usefixtures("kernel")

transformers = pytest.importorskip("transformers")


@pytest.fixture
def model(device):
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device)


def step(model, **given):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(37, (2, 6), generator=generator).to(next(model.parameters()).device)
    labels = tokens.clone()
    labels[0, 2:4] = -100
    model.zero_grad()
    loss = model(input_ids=tokens, labels=labels, **given).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("given", "in_place"),
    [({}, False), ({}, True), ({"num_items_in_batch": 5}, False), ({"shift_labels": torch.arange(12)}, True)],
    ids=["mean", "in place", "items", "flat, in place"],
)
def test_loss_and_gradients_stay_what_they_were_there_and_back(model, in_place, given, capsys):
    before = step(model, **given)
    assert replace_loss(model, in_place=in_place) == capsys.readouterr().out.strip()
    assert isinstance(model.loss_function, FusedCausalLoss) and model.loss_function.in_place is in_place
    fused = step(model, **given)
    torch.testing.assert_close(fused, before, rtol=1e-4, atol=1e-6)
    assert restore_loss(model) == "LlamaForCausalLM.loss_function: ForCausalLMLoss as it was" == capsys.readouterr().out.strip()
    assert not isinstance(model.loss_function, FusedCausalLoss)
    assert restore_loss(model, verbose=False) == ""
    after = step(model, **given)
    assert torch.equal(after[0], before[0])


def test_a_second_call_changes_in_place_alone_and_a_loss_of_the_models_own_comes_back(model):
    def own(logits, labels, vocab_size, **kwargs):
        return kept(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)

    kept = model.loss_function
    model.loss_function = own
    replace_loss(model, verbose=False)
    assert replace_loss(model, in_place=True, verbose=False).endswith("already fused cross-entropy, in place")
    restore_loss(model, verbose=False)
    assert model.loss_function is own


def test_the_loss_of_a_model_inside_of_torch_compile_is_found(model):
    assert "fused cross-entropy" in str(adopt(torch.compile(model), verbose=False))


def test_another_loss_is_left_alone(model):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().square().mean()
    kept = model.loss_function
    with pytest.raises(ValueError, match="computes something else than the mean cross-entropy of next tokens; left alone"):
        replace_loss(model)
    assert model.loss_function is kept


def test_models_that_call_none_get_no_line():
    """Each has one: it is an attribute of all models of transformers."""
    alone = {"blocks": False, "rotary": False, "verbose": False}
    llama = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    without = [
        transformers.LlamaModel(transformers.LlamaConfig(**llama)),
        transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=8, d_model=8, num_layers=1, num_heads=2, d_ff=8)
        ),
        nn.Linear(2, 2),
    ]
    for model in without:
        with pytest.raises(ValueError, match=f"{type(model).__name__} calls no loss_function"):
            replace_loss(model)
        assert adopt(model, **alone).loss == ""
    own = type(
        "Own", (transformers.LlamaForCausalLM,), {"forward": lambda self, *x, **y: super(type(self), self).forward(*x, **y)}
    )
    assert "fused cross-entropy" in adopt(own(transformers.LlamaConfig(**llama)), **alone).loss
