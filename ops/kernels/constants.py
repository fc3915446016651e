"""What a kernel is compiled for, as one argument."""

import triton.language as tl

from . import INTERPRET


class Constants:
    """Base of the frozen dataclasses of a kernel's variants: a kernel finds constants in their fields."""

    def __post_init__(self) -> None:
        if not INTERPRET:  # which takes plain values
            for name, value in vars(self).items():
                object.__setattr__(self, name, tl.constexpr(value))
