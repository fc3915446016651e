"""A Lazy takes part in a program as the tensor that it stands for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import replace_norms
from ops.adopting.lazy import Lazy, Role, settled

pytestmark = pytest.mark.usefixtures("kernel")

N = 16
X, H, G = (torch.randn(2, 3, N, generator=torch.Generator().manual_seed(i)) for i in range(3))
GAIN, ROWS = torch.linspace(0.5, 2, N), torch.tensor([0.0, 2.0]).view(2, 1, 1)


def changed_in_place(x, h):
    other = h
    h.mul_(GAIN)
    x.add_(h)
    return x + other


PROGRAMS = {
    "add": lambda x, h: x + h,
    "alpha": lambda x, h: torch.add(x, h, alpha=2),
    "in place": lambda x, h: h.add_(x),
    "in place, by nobody's name": lambda x, h: changed_in_place(x, h),
    "layer scale": lambda x, h: x + h * GAIN,
    "drop path": lambda x, h: x + h.div(0.5) * ROWS,
    "constants": lambda x, h: 0.7 * x + 0.3 * h / 2,
    "two branches": lambda x, h: h + torch.tanh(h * 2) + x,
    "two branches, one of them scaled": lambda x, h: h + 0.5 * h + x,
    "branch twice": lambda x, h: x + h + h,
    "stream twice": lambda x, h: (x + h) + (x + h),
    "gate": lambda x, h: x + h * torch.sigmoid(h.mean(1, keepdim=True)),
    "a part": lambda x, h: (x + h)[:, 0] + h[:, 1],
    "clamp": lambda x, h: (x + h).clamp(-0.5, 0.5),
    "cat": lambda x, h: torch.cat([x + h, h], 1),
    "rows": lambda x, h: (x + h).reshape(-1, N).view(2, 3, N) + h.view(2, 3, N),
    "heads": lambda x, h: (x + h).view(2, 3, 4, -1).transpose(1, 2),
    "another dtype": lambda x, h: x + h.double(),
    "broadcast": lambda x, h: x + h[:, :1],
    "metadata": lambda x, h: (x + h).new_empty((x + h).size()).zero_() + x.size(-1) * h + h.dim() + len(h),
    "power, minus, matmul": lambda x, h: ((x + h) ** 2 - h) @ h.transpose(1, 2),
    "in a branch's dtype": lambda x, h: (x + h).to(torch.float32) + h.to(torch.bfloat16).float(),
    "interpolated": lambda x, h: torch.lerp(x, h, 0.3) + F.gelu(x + h),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("norm", [None, nn.RMSNorm(N, eps=1e-3)], ids=["none", "rmsnorm"])
def test_a_program_computes_and_differentiates_what_it_did_with_tensors(program, norm):
    results = []
    adopted = norm and nn.Sequential(norm)
    if adopted:
        replace_norms(adopted, verbose=False)
    for is_lazy in (False, True):
        x, h = (t.clone().requires_grad_() for t in (X, H))
        a, b = x * 1, h * 1  # which may be changed in place
        y = program(a, Lazy(b, (Role("h"),), adopted and adopted[0]) if is_lazy else b)
        if norm is not None and y.shape[-1] == N and y.dtype is torch.float32:
            y = y + adopted(y) * 2
        y = settled(y)
        results.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), [x, h], allow_unused=True)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_what_a_norm_will_give_waits_on_the_sum_until_somebody_changes_that():
    norm = nn.LayerNorm(N)
    replace_norms(norm, verbose=False)
    for change in (lambda x: x, lambda x: x.mul_(2), lambda x: x.view(-1, N), lambda x: x[:1], lambda x: x.clone()):
        total = change(X + Lazy(H, (Role("h"),), norm))
        waits = getattr(total if total._base is None else total._base, "_ahead", None)
        y = norm(total)
        assert type(total) is torch.Tensor
        torch.testing.assert_close(y, F.layer_norm(change(X + H), (N,)))
        assert waits is None or (y.data_ptr() == waits.y.data_ptr()) == (total._version == 0 and total.numel() == X.numel())


def test_everybody_who_computes_a_dropped_branch_drops_the_same():
    branch = F.dropout(Lazy(torch.ones(64, N)), 0.5)
    sums = [torch.zeros(64, N) + branch for _ in range(2)]
    assert torch.equal(*sums) and torch.equal(sums[0], branch.tensor())
    assert set(sums[0].unique().tolist()) == {0.0, 2.0}


def test_what_was_made_without_gradients_has_none_and_what_was_made_with_them_keeps_them():
    weight = nn.Parameter(torch.ones(N))
    with torch.no_grad():
        frozen = Lazy(H) * weight
    assert not (X + frozen).requires_grad
    branch = Lazy(H) * weight
    with torch.no_grad():
        assert not settled(branch * 2 + 1).requires_grad
    assert branch.tensor().requires_grad and (X + branch).requires_grad


def test_two_sums_that_wait_for_another_branch_keep_both_streams():
    a, b = (Lazy(branch, (Role("mlp", waits=True),)) for branch in (H, G))
    torch.testing.assert_close(settled((X + a) + (X + b)), (X + H) + (X + G))


def test_a_name_that_no_tensor_has_is_no_attribute():
    with pytest.raises(AttributeError, match="Lazy has no attribute 'hidden_states', and neither has a tensor"):
        _ = Lazy(X).hidden_states
    assert not hasattr(Lazy(H), "__cuda_array_interface__") and isinstance(Lazy(H), Lazy)
