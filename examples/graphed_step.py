"""A whole training step of a model of your own as one CUDA graph: forward, backward, clip, AdamW, learning rate and dropout.

    python examples/graphed_step.py

What must hold, for any model:

    shapes      never change, and the batch is copied into tensors that stay where they are
    numbers     that change are tensors: a capture freezes a Python number, such as a learning rate
    waiting     nothing in the step waits for the GPU: no .item(), no `if` on a tensor; AdamW(fused=True), capturable
    warm-up     a few steps on the stream of the capture: kernels are compiled, and the optimizer makes its state
    randomness  each replay draws on from torch's generator; seeded by the step, dropout is right after a resume too
    results     are tensors that the next replay overwrites: copy them, or read them before

Without a GPU the same step runs as it is.
"""

import copy
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/graphed_step.py`

from examples.nanogpt_block import GPT
from ops import adopt

WARM_UP = 3


class Step:
    def __init__(self, model: GPT, batch: Tensor, graph: bool) -> None:
        self.model, self.batch, self.graph, self.done = model, torch.zeros_like(batch), graph, 0
        self.rate = torch.zeros((), device=batch.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, fused=True)
        self.stream = torch.cuda.Stream() if graph else None

    def __call__(self, batch: Tensor, number: int) -> Tensor:
        """The loss of step `number` on tokens [B, T + 1]; the next step overwrites it."""
        self.batch.copy_(batch, non_blocking=True)
        self.rate.fill_(1e-3 * min(1.0, (number + 1) / 20))
        torch.manual_seed(number)
        if self.done < WARM_UP or not self.graph:
            self.done += 1
            if self.stream is None:
                return self.update()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.update()
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.done == WARM_UP:
            self.done += 1
            for group in self.optimizer.param_groups:
                group["capturable"] = True
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured, stream=self.stream):  # launches nothing
                self.loss = self.update()
        self.captured.replay()
        return self.loss

    def update(self) -> Tensor:
        with torch.autocast(self.batch.device.type, torch.bfloat16):
            loss = self.model(self.batch[:, :-1], self.batch[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def main() -> None:
    gpu = torch.cuda.is_available()
    device, sizes, rows, steps = ("cuda", (65, 256, 384, 6, 6, 0.2), 64, 60) if gpu else ("cpu", (65, 32, 32, 4, 2, 0.2), 4, 8)
    torch.manual_seed(0)
    start, batches = GPT(*sizes).to(device), torch.randint(65, (steps, rows, sizes[1] + 1), device=device)
    adopt(start)  # the norms, fused; leave it out for PyTorch's
    losses = {}
    for graph in dict.fromkeys((False, gpu)):
        step, of_each = Step(copy.deepcopy(start), batches[0], graph), torch.zeros(steps, device=device)
        for number, batch in enumerate(batches):
            if number == steps // 2:
                if gpu:
                    torch.cuda.synchronize()
                began = time.perf_counter()
            of_each[number] = step(batch, number)
        losses[graph] = of_each.tolist()  # waits for the GPU
        ms = 1000 * (time.perf_counter() - began) / (steps - steps // 2)
        print(f"{'one CUDA graph' if graph else 'no graph'}: {ms:.2f} ms a step, last loss {losses[graph][-1]:.4f}")
    if gpu:
        print("largest difference of a loss:", max(abs(a - b) for a, b in zip(*losses.values(), strict=True)))


if __name__ == "__main__":
    main()
