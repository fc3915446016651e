"""The root mean square and the largest magnitude of each row of the stream, against fp64."""

import pytest
import torch

from ops import Norm, norm_fn

from .cases import BF16, FP32, equal
from .tiles import SHAPES, tile_for


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("norm", "n"), [(Norm.layernorm, 1), (Norm.rmsnorm, 72), (Norm.derf, 24), (Norm.none, 72)])
def test_statistics_are_those_of_the_stream_as_it_is_stored(norm, n, shape, device, use_tile):
    use_tile(tile_for(n, shape))
    torch.manual_seed(0)
    x, residual = (torch.randn(2, 3, n, device=device, dtype=dtype).requires_grad_() for dtype in (BF16, FP32))
    given = {"residual": residual, "dropout_p": 0.3, "seed": 5, "branch_norm": "rmsnorm", "prenorm": True}
    y, r = norm_fn(norm, x, **given)
    *others, rms, peak = norm_fn(norm, x, **given, return_statistics=True)
    assert equal(others, (y, r)) and not rms.requires_grad and not peak.requires_grad
    wide = r.detach().double()
    torch.testing.assert_close(rms.double(), wide.square().mean(-1).sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(peak.double(), wide.abs().amax(-1), rtol=0, atol=0)
    expected = torch.autograd.grad(y.float().sin().sum() + r.sin().sum(), (x, residual))
    found = torch.autograd.grad(others[0].float().sin().sum() + others[1].sin().sum(), (x, residual))
    assert equal(found, expected)


def test_they_come_last_compiled_and_in_inference_too(device):
    x, residual = (torch.randn(4, 32, device=device) for _ in range(2))

    def site(x):
        return norm_fn("rmsnorm", x, residual=residual, dropout_p=0.5, seed=1, return_dropout_mask=True, return_statistics=True)

    y, mask, mask1, rms, peak = site(x)
    assert mask.dtype == torch.bool and mask1 is None and rms.shape == peak.shape == (4,)
    compiled = torch.compile(site, backend="aot_eager", fullgraph=True)
    assert equal(compiled(x)[3:], (rms, peak)) and equal(compiled(x.requires_grad_())[:1], (y,))
    out = torch.empty_like(x)
    found = norm_fn("rmsnorm", x.detach(), residual=residual, out=out, return_statistics=True)
    assert found[0] is out
    torch.testing.assert_close(found[2], (x.detach() + residual).abs().amax(-1))
