"""Replaced norms and fused blocks inside DDP and FSDP2, one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ops import adopt, replace_norms

from .lookalikes import Gemma
from .toys import Model, N, fused


@pytest.fixture
def mesh(tmp_path, device):
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    dist.destroy_process_group()


def gradients(model, x):
    model(x).sin().sum().backward()
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("wrap", [lambda model, mesh: DistributedDataParallel(model), sharded], ids=["DDP", "FSDP2"])
def test_fused_blocks_have_the_same_gradients_when_wrapped(wrap, mesh, device):
    torch.manual_seed(0)
    model = fused(Model()).to(device)
    x = torch.randn(3, N, device=device)
    expected = gradients(copy.deepcopy(model), x)
    found = gradients(wrap(model, mesh), x)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_replacing_after_ddp_works_and_after_sharding_says_why_not(mesh, device):
    ddp = DistributedDataParallel(Model().to(device))
    assert all(site.fused and site.name.startswith("module.") for site in replace_norms(ddp, verbose=False))
    sites = replace_norms(sharded(Model().to(device), mesh), verbose=False)
    assert sites and all("DTensor; replace norms before a model is sharded or" in site.why for site in sites)


def test_a_model_on_meta_is_adopted_then_sharded_then_materialised(mesh, device):
    torch.manual_seed(0)
    model, x = Model(norm=Gemma), torch.randn(3, N, device=device)
    with torch.device("meta"):
        other = Model(norm=Gemma)
    assert len(adopt(other, verbose=False).blocks) == 2
    sharded(other, mesh).to_empty(device=device)
    for module in other.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not other.blocks[0].ln_1.weight.full_tensor().any()  # as Gemma begins
    values = model.to(device).state_dict()
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(distribute_tensor(values[name], mesh, p.placements))
    found, expected = gradients(other, x), gradients(model, x)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)
