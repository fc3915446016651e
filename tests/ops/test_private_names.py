"""Without a private name of torch that the package uses, results stay right."""

import os
import subprocess
import sys

from tests.runs import ROOT

NAMES = [
    "torch._C._len_torch_dispatch_stack", "torch._C._len_torch_function_stack", "torch._C._are_functorch_transforms_active",
    "torch._C._AutoDispatchBelowAutograd", "torch.autograd.forward_ad._current_level",
    "torch.utils._pytree.register_pytree_node",
]  # fmt: skip
CODE = """
import os, sys, torch, torch._dynamo  # torch's own modules keep what they have imported
from torch import nn
for name in sys.argv[1:]:
    if os.fork() == 0:
        owner, _, attribute = name.rpartition(".")
        delattr(sys.modules[owner], attribute)
        import ops
        x, r = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16)
        net = nn.Sequential(nn.LayerNorm(16))
        y = net(x + r)
        wanted = torch.autograd.grad(y.sin().sum(), x)
        weight, bias = net[0].weight, net[0].bias
        found = ops.layer_norm_fn(x, weight, bias, residual=r, eps=1e-5)
        torch.testing.assert_close(found, y)
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), x), wanted)
        ops.adopt(net, verbose=False)
        torch.testing.assert_close(net(x + r), y)
        print(name, "is not missed", flush=True)
        os._exit(0)
    os.wait()
"""


def test_each_private_name_of_torch_may_vanish():
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CODE, *NAMES], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name} is not missed" for name in NAMES], done.stderr
