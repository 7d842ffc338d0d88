"""How the GPU benchmark takes time: of nodes of CUDA graphs, plain launches, and the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[Any], Any]  # on one of a problem's inputs
HEAD_START = 400_000  # cycles that the GPU waits, so that the host has launched all by then


class Timer:
    """Measures on one GPU. `cache_bytes` of memory are enough to leave nothing of the L2 cache."""

    def __init__(self) -> None:
        self.cache_bytes = 3.5 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._rinse = torch.zeros(int(self.cache_bytes) // 4, device="cuda")
        self._stream = torch.cuda.Stream()

    def capture(self, call: Call, inputs: Sequence[Any], nodes: int) -> torch.cuda.CUDAGraph:
        """A graph of calls that go round the inputs. The first call is made before: it may compile.

        Outputs live until their input's next turn, so they go round as well. (torch.cuda.graph would
        collect garbage and return memory each time, which takes longer than the measurement.)
        """
        graph = torch.cuda.CUDAGraph()
        outputs: list[object] = [None] * len(inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call(inputs[0])
            torch.cuda.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(nodes):
                    outputs[i % len(inputs)] = call(inputs[i % len(inputs)])
            finally:
                graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def replay_seconds(self, graph: torch.cuda.CUDAGraph, rinse: bool) -> float:
        """One replay, on the GPU. `rinse`: it finds nothing in the L2 cache."""
        if rinse:
            self._rinse.sum()
        torch.cuda._sleep(HEAD_START)
        return _event_seconds(graph.replay)

    def plain_seconds(self, call: Call, inputs: Sequence[Any], count: int) -> float:
        """A call in a loop of plain launches: the host's time or the GPU's, whichever is longer."""

        def loop() -> None:
            for i in range(count):
                call(inputs[i % len(inputs)])

        torch.cuda.synchronize()
        return _event_seconds(loop) / count


def _event_seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return seconds


def host_seconds(call: Callable[[], object], count: int = 200) -> float:
    """A call that the GPU keeps up with, on the host: the median of a turn."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times)
