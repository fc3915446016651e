"""What counts as step time."""

import pytest
import torch

from measure.clock import StepClock

CPU = torch.device("cpu")


def test_only_whole_steps_after_warm_up_are_step_time():
    now = [0.0]  # seconds
    clock = StepClock(CPU, warmup=2, now=lambda: now[0])

    def steps(*each_ms):
        for ms in each_ms:
            with clock.step():
                now[0] += ms / 1000

    steps(9000, 500)
    assert clock.window() is None and clock.median_ms is None
    for ms in (10, 12):
        steps(ms)
        with clock.paused():
            now[0] += 5
        now[0] += 0.7
    with pytest.raises(KeyError), clock.step():
        raise KeyError
    assert clock.steps_ms == pytest.approx([10, 12])
    assert clock.window().median_ms == pytest.approx(11) and clock.window() is None
    steps(20, 21, 99)
    window = clock.window()
    assert (window.median_ms, window.mean_ms) == pytest.approx((21, 140 / 3)) and clock.median_ms == pytest.approx(20)


def test_the_peak_of_memory_is_that_of_the_steps_of_this_run(monkeypatch):
    peak = [40.0]  # GiB of an earlier run of the process
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak[0] * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peak.__setitem__(0, 1.0))
    on_gpu = StepClock(torch.device("cuda"))
    peak[0] = 5.0
    with on_gpu.paused():
        peak[0] = 30.0  # evaluation
    assert on_gpu.peak_gb == 5.0 and StepClock(CPU).peak_gb is None


@pytest.mark.parametrize(("ms", "ahead"), [(0.5, 64), (100.0, 10), (5000.0, 2)])
def test_the_host_is_ahead_of_a_gpu_by_a_second_at_most_and_times_are_read_up_to_a_line(monkeypatch, ms, ahead):
    class Mark:
        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            return ms

    waited: list[Mark] = []
    monkeypatch.setattr(StepClock, "_mark", lambda _: Mark())
    monkeypatch.setattr(StepClock, "_forget_peak", lambda _: None)
    clock = StepClock(torch.device("cuda"), warmup=3)
    for step in range(1, 200):
        with clock.step():
            pass
        assert step - 3 - len(waited) <= ahead
        if step == 50:
            at_line = clock.counted
    assert step - 3 - len(waited) == ahead, "and no less"
    assert clock.window(at_line).mean_ms == ms and len(waited) == step - 3 - ahead, "these had passed"
    assert clock.window().mean_ms == ms and len(waited) == step - 3 == len(clock.steps_ms)


@pytest.mark.gpu
def test_cuda_steps_are_timed_by_events_without_counting_what_lies_between():
    device = torch.device("cuda")
    clock, x = StepClock(device, warmup=2), torch.randn(4096, 4096, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(6):
        with clock.step():
            x @ x
        begin.record()
        for _ in range(50):
            x @ x
        end.record()
    torch.cuda.synchronize()
    assert clock.median_ms < begin.elapsed_time(end) / 5 and len(clock.steps_ms) == 4


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_step_waits_for_what_an_accelerator_has_queued(device, monkeypatch):
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    with StepClock(torch.device(device), warmup=0).step():
        pass
    assert waited == ([] if device == "cpu" else [torch.device(device)] * 2)
