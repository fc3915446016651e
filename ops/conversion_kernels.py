"""bf16 to fp32 and back in fewer instructions than the compiler takes, on NVIDIA GPUs; the same values everywhere."""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .backend import INTERPRET

PTX = tl.constexpr(not INTERPRET)
WIDEN_BF16 = tl.constexpr("""{
    .reg .b32 %pair;
    mov.b32 %pair, $2;
    shl.b32 $0, %pair, 16;
    and.b32 $1, %pair, 0xffff0000;
    }""")


@triton.jit
def widen(b):
    """A block in fp32. Two neighbours in bf16 share a register: two instructions for both, where the compiler takes three."""
    if PTX and b.dtype == tl.bfloat16 and cuda_capability_geq(8):
        b_wide = tl.inline_asm_elementwise(WIDEN_BF16, "=r,=r,r", [b], dtype=tl.float32, is_pure=True, pack=2)
    else:
        b_wide = b.to(tl.float32)
    return b_wide


@triton.jit
def widen_again(b):
    """`widen`, of which the compiler does not know that it has been done before.

    It would keep the first result instead of the block itself: twice the registers. So the instruction is not pure.
    """
    if PTX and b.dtype == tl.bfloat16 and cuda_capability_geq(8):
        b_wide = tl.inline_asm_elementwise(WIDEN_BF16, "=r,=r,r", [b], dtype=tl.float32, is_pure=False, pack=2)
    elif PTX and b.dtype == tl.float16 and cuda_capability_geq(8):
        b_wide = tl.inline_asm_elementwise(
            """{
            .reg .b16 %low, %high;
            mov.b32 {%low, %high}, $2;
            cvt.f32.f16 $0, %low;
            cvt.f32.f16 $1, %high;
            }""",
            "=f,=f,r", [b], dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        b_wide = b.to(tl.float32)
    return b_wide


@triton.jit
def narrow(b, DTYPE: tl.constexpr):
    """An fp32 block rounded to DTYPE; as with `rounded`, two at a time for bf16."""
    if PTX and tl.bfloat16 == DTYPE and cuda_capability_geq(8):
        b_narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        b_narrow = b.to(DTYPE)
    return b_narrow


@triton.jit
def rounded(b, DTYPE: tl.constexpr):
    """An fp32 block with the values that DTYPE has, in fp32. The compiler would round one bf16 at a time, in the slow unit."""
    if PTX and tl.bfloat16 == DTYPE and cuda_capability_geq(8):
        b_rounded = tl.inline_asm_elementwise(
            """{
            .reg .b32 %pair;
            cvt.rn.bf16x2.f32 %pair, $3, $2;
            shl.b32 $0, %pair, 16;
            and.b32 $1, %pair, 0xffff0000;
            }""",
            "=r,=r,f,f", [b], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        b_rounded = b.to(DTYPE).to(tl.float32)
    return b_rounded
