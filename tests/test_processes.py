"""The op in many threads and processes: first uses at once, imports, fork and spawn, data loaders."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import assert_same_bits, check
from sample import Sample, make_sample
from test_rope_pool import MANY, run_in_threads

import torch_ropepool

HERE = Path(__file__).parent


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    """In a process in which nothing has used the op, or torch's threads, so far."""
    path = os.pathsep.join([str(Path(torch_ropepool.__file__).parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def assert_runs(code: str) -> None:
    done = run_alone(code)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_threads_race_for_the_first_call_of_a_process():
    """The choice of the instruction set and the cache of tables are made by whichever comes first."""
    assert_runs(
        "import torch, torch_ropepool\n"
        "from checks import check\n"
        "from sample import make_sample\n"
        "from test_rope_pool import run_in_threads\n"
        "torch.set_num_threads(1)\n"
        "calls = [make_sample(seed=i, rope_base=10000.0 + i % 2) for i in range(8)]\n"
        "run_in_threads(lambda i: check(calls[i]))\n"
        "print('done')"
    )


def test_threads_import_the_package_at_once():
    assert_runs(
        "import threading\n"
        "barrier, ready = threading.Barrier(8), []\n"
        "def work():\n"
        "    barrier.wait()\n"
        "    import torch_ropepool\n"
        "    pool = torch_ropepool.KVPool(1, 4, 1, 2)\n"
        "    import torch\n"
        "    q = torch.ones(1, 1, 2)\n"
        "    ready.append(torch_ropepool.rope_pool_fused(q, q, q, torch.zeros(1, dtype=torch.int32),\n"
        "        pool.alloc(1), pool.k(0), pool.v(0), head_dim=2, num_qo_heads=1, num_kv_heads=1,\n"
        "        rope_base=1e4))\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "assert len(ready) == 8\n"
        "print('done')"
    )


def callers_resize_torch_threads() -> None:
    """Each caller has threads of torch's beside it, now more and now fewer, and slots of its own."""
    call = make_sample(4 * MANY, pool_size=4 * MANY)
    want = call.clone()
    want.run()
    rows = [slice(i * MANY, (i + 1) * MANY) for i in range(4)]

    def work(i: int) -> None:
        names = ("q", "k", "v", "positions", "slots")
        part = call.with_(**{name: getattr(call, name)[rows[i]] for name in names})
        for repeat in range(6):
            torch.set_num_threads(1 + (i + repeat) % 3)
            part.run()

    run_in_threads(work, num_threads=4)
    assert_same_bits(call.k_pool, want.k_pool)
    assert_same_bits(call.v_pool, want.v_pool)


def test_callers_resize_torch_threads():
    assert_runs(
        "import torch_ropepool, test_processes\ntest_processes.callers_resize_torch_threads()\nprint('done')"
    )


# ---- Processes. A fork of one that has used torch's OpenMP threads would hang, as with plain torch.


def write_rows(call: Sample, part: int, parts: int) -> None:
    """In a worker: its share of the tokens, into pools in shared memory."""
    torch.set_num_threads(1)
    names = ("q", "k", "v", "positions", "slots")
    call.with_(**{name: getattr(call, name)[part::parts] for name in names}).run()


def processes_share_a_pool(method: str) -> None:
    torch.set_num_threads(1)
    call = make_sample(64, pool_size=100)
    want = call.clone()
    want.run()
    shared = call.map(lambda t: t.clone().share_memory_())
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=write_rows, args=(shared, part, 3)) for part in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert_same_bits(shared.k_pool, want.k_pool)
    assert_same_bits(shared.v_pool, want.v_pool)


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_forked_processes_share_a_pool():
    assert_runs(
        "import torch_ropepool, test_processes\ntest_processes.processes_share_a_pool('fork')\nprint('done')"
    )


def test_spawned_processes_share_a_pool(monkeypatch):
    path = os.pathsep.join([str(Path(torch_ropepool.__file__).parents[1]), str(HERE)])
    monkeypatch.setenv("PYTHONPATH", path)
    import torch.multiprocessing  # noqa: F401  how tensors go to other processes

    processes_share_a_pool("spawn")


class Rotated(torch.utils.data.Dataset):
    """Each item is a call, made where the loader wants it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        return make_sample(3, seed=i).run()[0]


def items_come_from_workers() -> None:
    torch.set_num_threads(1)
    want = [Rotated()[i] for i in range(12)]
    loader = torch.utils.data.DataLoader(Rotated(), batch_size=4, num_workers=2)
    for batch, first in zip(loader, range(0, 12, 4), strict=True):
        assert_same_bits(batch, torch.stack(want[first : first + 4]))
    check(make_sample())


def test_data_loader_workers():
    assert_runs(
        "import torch_ropepool, test_processes\n"
        "if __name__ == '__main__':\n"
        "    test_processes.items_come_from_workers()\n"
        "    print('done')"
    )
