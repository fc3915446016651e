"""What enters and leaves a module of an adopted model is a tensor: whoever looks at it, changes it or differentiates it finds
what the model had without being adopted."""

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ops import adopt

from .lookalikes import Llama
from .toys import Block, Model, N, block_of, nodes_behind


def own_model():
    model = Model(norm=Llama, depth=3)
    return model, model.blocks


def tiny_llama():
    transformers = pytest.importorskip("transformers")
    how = {"hidden_size": N, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 8}
    model = transformers.LlamaModel(transformers.LlamaConfig(**how))

    class OfEmbeddings(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(inputs_embeds=x, use_cache=False).last_hidden_state

    return OfEmbeddings(), model.layers


def norm_of(block):
    return block.ln_2 if isinstance(block, Block) else block.post_attention_layernorm


def sublayer_of(block):
    return block.attn if isinstance(block, Block) else block.self_attn


def first(output):
    return output[0] if isinstance(output, tuple) else output


def run(model, blocks, x):
    return [model(x)]


def edited(x):
    x.mul_(1.5)
    x[:, 0] += 1
    F.relu(x, inplace=True)


def edited_by_a_hook(model, blocks, x):
    blocks[0].register_forward_hook(lambda block, args, output: edited(first(output)))
    return [model(x)]


def edited_by_a_pre_hook(of):
    def program(model, blocks, x):
        for block in blocks[1:]:
            of(block).register_forward_pre_hook(lambda module, args: None if torch.is_grad_enabled() else edited(args[0]))
            of(block).register_forward_pre_hook(lambda module, args: (F.relu(args[0] * 1.5, inplace=True),))
        with torch.no_grad():
            y = model(x)
        return [y, model(x)]

    return program


def replaced_by_a_hook(of):
    def program(model, blocks, x):
        of(blocks[0]).register_forward_hook(lambda module, args, output: changed(output, lambda y: y * 2 + y.mean()))
        return [model(x)]

    return program


def changed(output, change):
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def changed_gradient(model, blocks, x):
    blocks[0].register_forward_hook(lambda block, args, output: first(output).register_hook(lambda g: g * 0.1) and None)
    return [model(x)]


def kept(of):
    """The values and gradients of what hooks have kept."""

    def program(model, blocks, x):
        found = []

        def keep(module, args, output):
            for t in (*args[:1], first(output)):
                assert type(t) is Tensor
                if t.requires_grad and not t.is_leaf:
                    t.retain_grad()
                    found.append(t)

        for block in blocks:
            of(block).register_forward_hook(keep)
        y = model(x)
        y.sin().sum().backward(retain_graph=True)
        gradients = [t.grad for t in found]
        assert gradients
        return [y, *found, *gradients]

    return program


def full_backward_hooks(of):
    def program(model, blocks, x):
        seen = []
        for block in blocks:
            of(block).register_full_backward_hook(lambda module, grads, upstream: seen.append((*grads, *upstream)))
        y = model(x)
        y.sin().sum().backward(retain_graph=True)
        assert seen
        return [y, *(g for gs in seen for g in gs if g is not None)]

    return program


def in_checkpoints(reentrant):
    def program(model, blocks, x):
        class Checkpointed(nn.Module):
            def __init__(self, block):
                super().__init__()
                self.block = block

            def forward(self, x, *args, **kwargs):
                return checkpoint(lambda y: self.block(y, *args, **kwargs), x, use_reentrant=reentrant)

        for i, block in enumerate(list(blocks)):
            blocks[i] = Checkpointed(block)
        return [model(x)]

    return program


def called(model, i, x):
    """A block of the model as the model calls it."""
    if isinstance(model, Model):
        return model.blocks[i](x)
    llama = model.model
    embeddings = llama.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    return first(llama.layers[i](x, position_embeddings=embeddings))


class Called(nn.Module):
    def __init__(self, model, i):
        super().__init__()
        self.of = [model, i]

    def forward(self, x):
        return called(*self.of, x)


def in_checkpoint_sequential(model, blocks, x):
    return [checkpoint_sequential([Called(model, i) for i in range(3)], 2, x * 1, use_reentrant=True)]


def pipeline(model, blocks, x):
    """Two stages that send tensors: activations one way, gradients the other."""
    sent = called(model, 1, called(model, 0, x))
    received = sent.detach().requires_grad_()
    y = called(model, 2, received)
    y.sin().sum().backward()
    sent.backward(received.grad, retain_graph=True)
    return [y.detach(), received.grad, sent]


def used_as_tensors(model, blocks, x):
    y = called(model, 0, x)
    assert type(y) is Tensor and isinstance(y, Tensor)
    kept = torch.as_tensor(y)
    with torch.no_grad():
        before = kept.clone()
        for p in blocks[0].parameters():
            p.mul_(2)  # what was given keeps its value
        out = torch.empty_like(y)
        torch.add(kept, 1, out=out)
    assert torch.equal(kept, before)
    return [y.detach(), out]


def seen_by_global_hooks(model, blocks, x):
    seen, names = {}, {module: name for name, module in model.named_modules()}

    def keep(module, grads, upstream):
        seen[names[module]] = [g for g in (*grads, *upstream) if g is not None]

    hook = nn.modules.module.register_module_full_backward_hook(keep)
    try:
        y = model(x)
        y.sin().sum().backward(retain_graph=True)
    finally:
        hook.remove()
    assert len(seen) > len(blocks)
    return [y, *(g for name in sorted(seen) for g in seen[name])]


def without_a_norm(model, blocks, x):
    for block in blocks:
        setattr(block, "ln_2" if isinstance(block, Block) else "post_attention_layernorm", nn.Identity())
    return [model(x)]


def with_a_class_patched(of):
    """As tools that put another forward into a class of somebody's file."""

    def program(model, blocks, x):
        part = of(blocks[0])
        own = next(cls for cls in type(part).__mro__ if cls.__name__ == type(part).__name__ and "_own" not in vars(cls))
        forward = own.forward
        own.forward = lambda self, *args, **kwargs: changed(forward(self, *args, **kwargs), lambda y: 0.7 * y)
        try:
            return [model(x)]
        finally:
            own.forward = forward

    return program


def parametrized(of):
    class Halved(nn.Module):
        def forward(self, weight):
            return 0.5 * weight

    def program(model, blocks, x):
        for block in blocks:
            nn.utils.parametrize.register_parametrization(of(block), "weight", Halved())
        return [model(x)]

    return program


def offloaded(model, blocks, x):
    with torch.autograd.graph.save_on_cpu():
        return [model(x)]


def with_other_parameters(model, blocks, x):
    others = {name: (p.detach() * 1.3).requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, others, (x,))
    gradients = torch.autograd.grad(y.sin().sum(), [*others.values()], retain_graph=True, allow_unused=True)
    return [y, *(g for g in gradients if g is not None)]


PROGRAMS = {
    "nothing": run,
    "global backward hooks": seen_by_global_hooks,
    "no norm": without_a_norm,
    "the class of a block is patched": with_a_class_patched(lambda block: block),
    "the class of a norm is patched": with_a_class_patched(norm_of),
    "the class of a sublayer is patched": with_a_class_patched(sublayer_of),
    "a parametrized norm": parametrized(norm_of),
    "saved tensors are offloaded": offloaded,
    "functional_call": with_other_parameters,
    "a hook edits the output": edited_by_a_hook,
    "a pre-hook edits the input": edited_by_a_pre_hook(lambda block: block),
    "a pre-hook edits the input of a norm": edited_by_a_pre_hook(norm_of),
    "a hook replaces an output": replaced_by_a_hook(lambda block: block),
    "a hook replaces an output of a norm": replaced_by_a_hook(norm_of),
    "a hook replaces an output of a sublayer": replaced_by_a_hook(sublayer_of),
    "a hook on the gradient": changed_gradient,
    "blocks' outputs are kept": kept(lambda block: block),
    "norms' inputs are kept": kept(norm_of),
    "sublayers' outputs are kept": kept(sublayer_of),
    "backward hooks of blocks": full_backward_hooks(lambda block: block),
    "backward hooks of norms": full_backward_hooks(norm_of),
    "backward hooks of sublayers": full_backward_hooks(sublayer_of),
    "blocks in checkpoints": in_checkpoints(False),
    "blocks in reentrant checkpoints": in_checkpoints(True),
    "checkpoint_sequential": in_checkpoint_sequential,
    "pipeline": pipeline,
    "as tensors": used_as_tensors,
}


def results(program, model, blocks, x):
    x = x.clone().requires_grad_()
    outputs = program(model, blocks, x * 1)
    for p in (x, *model.parameters()):
        p.grad = None
    live = [y for y in outputs if y.requires_grad]
    if live:
        sum(y.sin().sum() for y in live).backward()
    return [*outputs, x.grad, *(p.grad for p in model.parameters())]


def check(program, model, adopted, pick, x, rtol=1e-4, atol=1e-5):
    model, adopted = copy.deepcopy((model, adopted))
    wanted = results(program, model, pick(model), x)
    for a, b in zip(results(program, adopted, pick(adopted), x), wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol * max(1.0, b.abs().max().item()))


@cache
def before_and_after(build, device):
    torch.manual_seed(0)
    model, _ = build()
    for p in model.to(device).parameters():
        nn.init.normal_(p, std=0.3)
    adopted = copy.deepcopy(model)
    assert len(adopt(adopted, loss=False, verbose=False).blocks) == 3
    return model, adopted


@pytest.mark.parametrize("build", [own_model, tiny_llama])
@pytest.mark.parametrize("name", PROGRAMS)
def test_who_looks_at_modules_from_outside_finds_what_was_there(name, build, device):
    torch.manual_seed(0)
    check(PROGRAMS[name], *before_and_after(build, device), blocks_of, torch.randn(2, 3, N, device=device))


def blocks_of(model):
    return model.blocks if isinstance(model, Model) else model.model.layers


# ---- inside a block --------------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


class FunctionNorm(nn.Module):
    """A norm that recognition takes for none, and that is a Function as those of apex and Liger are."""

    class Of(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x / x.abs().mean(-1, keepdim=True)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(x / x.abs().mean(-1, keepdim=True), x, g)[0]

    def forward(self, x):
        return self.Of.apply(x)


def rearranged(x):
    """As einops: whatever is no tensor is an error."""
    if type(x) is not Tensor:
        raise TypeError(f"Tensor type unknown to einops {type(x)}")
    return x.flatten(0, 1).unflatten(0, x.shape[:2])


def two(self, x, on_x=lambda x: x, on_branch=lambda h: h):
    x = on_x(x + on_branch(self.attn(self.ln_1(x))))
    return x + on_branch(self.mlp(self.ln_2(x)))


def autocast_inside(self, x):
    with torch.autocast(x.device.type, torch.bfloat16):
        h = self.attn(self.ln_1(x))
    x = x + h.float()
    with torch.autocast(x.device.type, enabled=False):
        return x + self.mlp(self.ln_2(x))


def in_place(self, x):
    y = x * 1
    y += self.attn(self.ln_1(y.clone()))
    return y.add_(self.mlp(self.ln_2(y.clone())))


def input_in_place(self, x):
    h = self.attn(self.ln_1(x.clone()))
    x += h
    return x + self.mlp(self.ln_2(x))


def keeps(self, x):
    x = x + self.attn(self.ln_1(x))
    self.held = x
    return x + self.mlp(self.ln_2(x))


def hooked_inside(self, x):
    x = x + self.attn(self.ln_1(x))
    if x.requires_grad:
        x.register_hook(lambda g: 0.1 * g)
    return x + self.mlp(self.ln_2(x))


def with_out(self, x):
    h = self.attn(self.ln_1(x))
    if torch.is_grad_enabled():
        return x + h + self.mlp(self.ln_2(x + h))
    total = torch.empty_like(x)
    torch.add(x, h, out=total)
    return total + self.mlp(self.ln_2(total))


INSIDE = {
    "gradient reversal on the stream": lambda self, x: two(self, x, on_x=Reversed.apply),
    "gradient reversal on the branch": lambda self, x: two(self, x, on_branch=Reversed.apply),
    "a norm that is a Function": lambda self, x: second(self, x + self.attn(self.ln_1(x))),
    "einops on the stream": lambda self, x: two(self, rearranged(x), on_x=rearranged),
    "einops on the branch": lambda self, x: two(self, x, on_branch=rearranged),
    "as_tensor": lambda self, x: two(self, x, on_x=torch.as_tensor, on_branch=torch.as_tensor),
    "isinstance": lambda self, x: two(self, x, on_branch=lambda o: o if isinstance(o, Tensor) else o[0]),
    "out=": with_out,
    "autocast inside": autocast_inside,
    "in place": in_place,
    "its input in place": input_in_place,
    "a reentrant checkpoint inside": lambda self, x: two(self, x) + checkpoint(self.attn, x, use_reentrant=True),
    "a branch that is a checkpoint": lambda self, x: (
        (y := x + checkpoint(self.attn, self.ln_1(x), use_reentrant=True))
        + checkpoint(self.mlp, self.ln_2(y), use_reentrant=True)
    ),
    "it keeps its stream": keeps,
    "a hook on its stream": hooked_inside,
}


def second(self, x):
    return x + self.mlp(self.other(x))


class Stack(nn.Module):
    def __init__(self, forward, depth=1):
        super().__init__()
        self.blocks = nn.ModuleList(block_of(forward, other=FunctionNorm()) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def gradients_of_streams(model, blocks, x):
    y = model(x)
    held = [block.held for block in blocks if hasattr(block, "held")]
    return [y, *held, *(torch.autograd.grad(y.sin().sum(), held, retain_graph=True) if held else ())]


@pytest.mark.parametrize("name", INSIDE)
def test_whatever_a_block_does_inside_it_computes_what_it_did(name, device):
    torch.manual_seed(0)
    model = Stack(INSIDE[name]).to(device)
    adopted, x = copy.deepcopy(model), torch.randn(2, 3, N, device=device)
    found = adopt(adopted, verbose=False)
    assert len(found.blocks) + len(found.left) == 1
    how = {"rtol": 0.05, "atol": 0.02} if name == "autocast inside" else {"rtol": 1e-4, "atol": 1e-5}
    check(gradients_of_streams, model, adopted, lambda model: model.blocks, x, **how)
    with torch.no_grad():
        torch.testing.assert_close(adopted(x.clone()), model(x.clone()), **how)


def test_a_part_of_a_block_that_anybody_else_calls_gives_a_tensor_and_a_wrapper_gets_one(device):
    class Wrapper(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            y = self.part(x)
            return 2 * (y if type(y) is Tensor else y[0])

    model = Stack(lambda self, x: two(self, x), depth=2).to(device)
    adopted, x = copy.deepcopy(model), torch.randn(2, 3, N, device=device)
    assert len(adopt(adopted, verbose=False).blocks) == 2
    assert type(adopted.blocks[0].attn(x)) is Tensor
    for one in (model, adopted):
        one.blocks[0].mlp, one.blocks[1].attn = Wrapper(one.blocks[0].mlp), Wrapper(one.blocks[1].attn)
    torch.testing.assert_close(adopted(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_function_that_a_flag_puts_on_a_branch_later_raises_and_one_set_before_is_as_it_was(device):
    def forward(self, x):
        return two(self, x, on_branch=Reversed.apply if self.flag else lambda h: h)

    block = block_of(forward, flag=False).to(device)
    later, before, x = copy.deepcopy(block), copy.deepcopy(block), torch.randn(2, 3, N, device=device)
    assert adopt(later, verbose=False).blocks
    block.flag = before.flag = later.flag = True
    adopt(before, verbose=False)
    check(run, block, before, lambda block: None, x)
    with pytest.raises(TypeError, match=r"would lose its gradient.* set the flag, then call adopt"):
        later(x)


def test_a_norm_and_the_stream_past_it_are_one_node_and_so_are_a_sum_and_its_norm(device, kernel):
    model = Stack(lambda self, x: two(self, x)).to(device)
    adopt(model, verbose=False)
    y = model(torch.randn(2, 3, N, device=device).requires_grad_() * 1)
    names = [node.name() for node in nodes_behind(y)]
    assert names.count("FusedNormBackward") == 2 and names.count("AddBackward0") == 1


def test_a_class_that_a_tool_patches_between_two_calls_of_adopt_is_recognised_as_it_is_then(monkeypatch):
    class Norm(nn.LayerNorm):
        pass

    first, second, x = nn.Sequential(Norm(8)), nn.Sequential(Norm(8)), torch.randn(3, 8)
    adopt(first, verbose=False)
    monkeypatch.setattr(Norm, "forward", lambda self, x: F.layer_norm(x, (8,), self.weight, self.bias, 0.5), raising=False)
    expected = second(x)
    adopt(second, verbose=False)
    assert second[0].has_own_forward() and not first[0].has_own_forward()
    for model in (first, second, copy.deepcopy(first), copy.deepcopy(second)):
        torch.testing.assert_close(model(x), expected)
