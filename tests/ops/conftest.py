import numpy as np
import pytest
import torch

from ops import backend, tiling


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Rows of more than 32 features are looped over, 16 columns at a time: the wide-row path at a size for the interpreter."""
    monkeypatch.setattr(tiling, "FORWARD_SINGLE_TILE", 32)
    monkeypatch.setattr(tiling, "BACKWARD_SINGLE_TILE", 32)
    monkeypatch.setattr(tiling, "LOOPED_BLOCK_N", 16)


@pytest.fixture(autouse=backend.INTERPRET)
def interpreter_rounds_like_a_gpu(monkeypatch):
    """The interpreter of Triton 3.6 and 3.7 cuts fp32 off at bf16 where every GPU rounds to nearest even; that would double
    each rounding error that these tests measure."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(values, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            fp32 = torch.from_numpy(np.array(values, dtype=np.float32))
            return fp32.bfloat16().view(torch.uint16).numpy().reshape(values.shape)
        return convert(values, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
