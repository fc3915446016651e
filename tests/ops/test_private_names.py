"""Without a private name of torch or Triton that the package uses, results stay right."""

import os
import re
import subprocess
import sys

import pytest
from triton.runtime.jit import JITFunction

from ops.torch_state import triton_internals
from tests.runs import ROOT

# By whether kernels run.
NAMES = {
    "0": [
        "torch._C._len_torch_dispatch_stack", "torch._C._len_torch_function_stack", "torch._C._are_functorch_transforms_active",
        "torch._C._get_tracing_state", "torch._C._AutoDispatchBelowAutograd",
        "torch.autograd.forward_ad._current_level", "torch.utils._pytree.register_pytree_node",
        "torch.nn.modules.module._has_any_global_hook",
    ],
    "1": ["triton.knobs", "triton.runtime.driver", "triton.compiler.CompiledKernel"],
}  # fmt: skip
CODE = """
import os, sys, torch, torch._dynamo, torch._inductor  # their own modules keep what they have imported
if os.environ["TRITON_INTERPRET"] == "1":
    import triton.experimental.gluon
from torch import nn
for name in sys.argv[1:]:
    if os.fork() == 0:
        owner, _, attribute = name.rpartition(".")
        held = getattr(sys.modules[owner], attribute)
        delattr(sys.modules[owner], attribute)
        if name in sys.modules:
            sys.modules[name] = None
        import ops
        if attribute == "_get_tracing_state":  # torch asks for it at each call of a module
            torch._C._get_tracing_state = held
        x, r = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16)
        net = nn.Sequential(nn.LayerNorm(16))
        y = net(x + r)
        wanted = torch.autograd.grad(y.sin().sum(), x)
        weight, bias = net[0].weight, net[0].bias
        found = ops.layer_norm_fn(x, weight, bias, residual=r, eps=1e-5)
        torch.testing.assert_close(found, y)
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), x), wanted)
        if "functor" in name:
            gradient = torch.func.grad(lambda x: ops.layer_norm_fn(x, weight, bias, residual=r, eps=1e-5).sin().sum())
            torch.testing.assert_close((gradient(x),), wanted)
        ops.adopt(net, verbose=False)
        torch.testing.assert_close(net(x + r), y)
        print(name, "is not missed", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("interpreter", NAMES)
def test_each_private_name_may_vanish(interpreter):
    env = os.environ | {"TRITON_INTERPRET": interpreter, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", CODE, *NAMES[interpreter]], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name} is not missed" for name in NAMES[interpreter]], done.stderr


def test_kernels_are_started_by_position_only_if_the_installed_triton_does_it_so(monkeypatch):
    assert triton_internals() is not None
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: None)
    assert triton_internals() is None


def test_no_other_file_of_the_operators_has_a_private_name():
    private = re.compile(
        r"\b(torch|triton|library|inductor)(\.\w+)*\.(_[a-z]\w+|knobs)|from (torch|triton)[\w.]*\._|super\(torch"
    )
    files = [path for path in (ROOT / "ops").rglob("*.py") if path.name != "torch_state.py" and path.parent.name != "adopting"]
    found = {f"{path.name}: {match[0]}" for path in files for match in private.finditer(path.read_text(encoding="utf-8"))}
    assert found == set()
