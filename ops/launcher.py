"""Starting a kernel for less than Triton's own launch costs the host."""

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver


class Launcher:
    """A kernel with all its arguments but the tensors, for one set of tensor dtypes (or absences) on one device.

    `kernel[grid](...)` looks at each of its arguments on each call to find the compiled variant: 20 µs for thirty of them.
    Here only the pointers change from call to call, and all that a variant can depend on in a pointer is whether it is
    16-byte aligned. So the first call with aligned pointers goes through `kernel[grid]` and keeps what was compiled, and
    later ones start that. Pointers go as ints, for which the driver isn't asked whose they are. Calls with other pointers,
    under Triton's interpreter or a profiler's launch hooks take `kernel[grid]`.
    """

    def __init__(self, kernel: Any, programs: int, scalars: tuple, device: torch.device, **constants: Any) -> None:
        """scalars: the kernel's arguments behind the tensors; constants: its constexprs and launch options, by name."""
        self.kernel, self.programs, self.scalars, self.constants = kernel, programs, scalars, constants
        self.index = device.index if device.type == "cuda" else None
        self.compiled: CompiledKernel | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Starts the kernel on the current stream of its device."""
        if self.programs == 0:
            return
        # Triton launches on the current device, which need not be the tensors'.
        if self.index is not None and self.index != torch.cuda.current_device():
            with torch.cuda.device(self.index):
                return self(*tensors)
        if self.compiled is not None and not _observed():
            arguments = self.arguments.copy()
            bits = 0
            for i in self.aligned:
                arguments[i] = pointer = tensors[i].data_ptr()  # type: ignore[union-attr]
                bits |= pointer
            for i in self.others:
                arguments[i] = tensors[i].data_ptr()  # type: ignore[union-attr]
            if bits % 16 == 0:
                self.run(
                    self.programs, 1, 1, driver.active.get_current_stream(self.index), self.function, self.metadata,
                    None, None, None, *arguments,
                )  # fmt: skip
                return
        compiled = self.kernel[(self.programs,)](*tensors, *self.scalars, **self.constants)
        if isinstance(compiled, CompiledKernel):
            self._keep(compiled, tensors)

    def _keep(self, compiled: CompiledKernel, tensors: tuple[Tensor | None, ...]) -> None:
        given = [i for i, t in enumerate(tensors) if t is not None]
        aligned = [i for i in given if _specialises_on_alignment(self.kernel.params[i])]
        if any(tensors[i].data_ptr() % 16 for i in aligned):  # type: ignore[union-attr]
            return
        self.aligned, self.others = aligned, [i for i in given if i not in aligned]
        # Absent pointers and constexprs are passed too, in their places; the compiled launch steps over them.
        names = self.kernel.arg_names[len(tensors) + len(self.scalars) :]
        self.arguments = [*[None] * len(tensors), *self.scalars, *(self.constants[name] for name in names)]
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.compiled = compiled  # last: another thread may be in __call__


def _specialises_on_alignment(parameter: Any) -> bool:
    return not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)


def _observed() -> bool:
    """Whether a profiler wants to hear of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
