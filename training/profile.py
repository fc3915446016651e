"""profile=true: a trace of a few steps of a run, and PyTorch's table of where their time goes.

The first WAIT steps compile and fill caches, WARMUP more start the profiler, then STEPS are profiled. None of them counts as
step time. The run folder gets trace.json (for chrome://tracing or ui.perfetto.dev) and profile.txt.
"""

from collections.abc import Iterator

import torch
from torch.profiler import profile, schedule

from measure.files import as_storage_errors, relative, replace_text, replacing
from training.run import Run

WAIT, WARMUP, STEPS = 3, 1, 3  # steps without the profiler, steps that start it, profiled steps
OVERLAP = "Our kernels wait for the one before them on the GPU: both count that time (finish_weight_gradients_kernel most)."
UNTIMED = WAIT + WARMUP + STEPS


def profiled(run: Run, steps: range) -> Iterator[int]:
    """Yields the steps of a run, and profiles some of them on the first rank. Raises StorageError: a file can't be written."""
    if not run.leads:
        yield from steps
        return
    timed = "self_device_time_total" if run.device.type == "cuda" else "self_cpu_time_total"

    def keep(profiler: profile) -> None:
        trace = run.folder / "trace.json"
        with as_storage_errors(trace), replacing(trace) as temporary:
            profiler.export_chrome_trace(str(temporary))
        table = profiler.key_averages().table(sort_by=timed, row_limit=30, max_name_column_width=80)
        replace_text(run.folder / "profile.txt", f"{STEPS} steps. {OVERLAP}\n\n{table}\n")
        run.say(f"trace.json and profile.txt of {STEPS} steps are in {relative(run.folder)}")

    plan = schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1, skip_first=WAIT)
    with profile(schedule=plan, on_trace_ready=keep) as profiler:
        for step in steps:
            yield step
            if run.device.type == "cuda" and step < steps.start + UNTIMED:
                torch.cuda.synchronize(run.device)  # so that a step's kernels are in its own part of the trace
            profiler.step()
