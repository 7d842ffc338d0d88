"""The Metal kernel and its host code on the emulator: the CPU's tests again, and what only a GPU has."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import emulated_mps
import metal_emulator
import pytest
import sample
import test_rope_pool
import test_variants
import torch
from expecttest import assert_expected_inline
from sample import OPS, make_sample
from test_contract_parity import outcome, random_spec
from test_rope_pool import (  # noqa: F401  run again, here on the emulator
    test_autograd_sees_that_a_tensor_was_written,
    test_dtypes,
    test_every_half_goes_through_unchanged,
    test_expanded,
    test_half_results_are_correctly_rounded,
    test_head_dims,
    test_heads,
    test_index_dtypes,
    test_inference_tensors,
    test_infinity_goes_where_the_reference_says,
    test_layouts,
    test_layouts_of_all_arguments,
    test_magnitudes,
    test_nan_stays_nan_in_its_pair,
    test_nothing_is_stored_for_negative_slots,
    test_other_rows_keep_every_bit,
    test_outputs_are_new_and_contiguous,
    test_packed_qkv,
    test_pools_in_one_buffer,
    test_positions,
    test_requires_grad_is_an_error,
    test_requires_grad_is_fine_without_grad_mode,
    test_rope_bases,
    test_some_slots_negative,
    test_strided_positions_and_slots,
    test_strides_that_reach_beyond_2_to_31_elements,
    test_the_three_ops_give_the_same_bits,
    test_token_counts,
    test_tokens_one_by_one,
    test_v_is_copied_bit_for_bit,
)
from test_variants import (  # noqa: F401
    test_all_at_once,
    test_attention_scaling_scales_what_turns,
    test_defaults_change_nothing,
    test_features_that_do_not_turn_keep_every_bit,
    test_inv_freq_that_changes_between_calls,
    test_mrope_at_huge_positions,
    test_mrope_of_equal_rows_is_plain_rope,
    test_mrope_with_more_pairs_than_turns,
    test_paged_slots_are_pages_and_offsets,
    test_pairs_of_arguments,
    test_same_bits_for_any_strides,
    test_strided_inv_freq,
    test_tiles_of_angles,
)
from test_variants import test_dtypes as test_dtypes_of_variants  # noqa: F401

from torch_ropepool import selftest


@pytest.fixture(autouse=True)
def on_the_emulator(monkeypatch) -> Iterator[None]:
    """The ops are those of the MPS backend. It has no float64, not even for inv_freq."""
    emulated_mps.load()
    for op in OPS:
        monkeypatch.setitem(sample.OPS, op, emulated_mps.checked(op))
    monkeypatch.setitem(test_variants.VALUES, "inv_freq", (None, torch.float32))
    monkeypatch.setattr(test_rope_pool, "MANY", 20)  # enough for a GPU, and the emulator is slow
    yield


# ---- Every kind of call of the self-test


@pytest.mark.parametrize("kind", sorted({case.kind for case in selftest.cases()}))
def test_selftest_cases(kind):
    """In three orders of the threads."""
    for case in selftest.cases():
        if case.kind != kind:
            continue
        for seed, op in enumerate(selftest.OPS):
            call = partial(emulated_mps.call, seed=seed)
            assert selftest.difference(case, op, "cpu", call) is None


def test_slots_out_of_range_are_not_stored():
    assert selftest.out_of_range("cpu", emulated_mps.call) is None


def test_the_later_token_of_a_slot_stays_where_determinism_is_asked():
    """No thread races for a row then: the emulator would report it."""
    assert selftest.repeated_slots("cpu", emulated_mps.call) is None
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "slots", [[3, 3, 40, 9, 40, 3, -1], [3, 4, 40, 9, 41, 5, -1]], ids=["repeat", "do not"]
)
def test_determinism_reads_the_slots_and_replaces_those_that_repeat(slots):
    """One copy to the host; where tokens share a slot one more to the device. 40 and 41 are out of range."""
    call = make_sample().with_(slots=torch.tensor(slots, dtype=torch.int32))
    on_cpu = call.clone().with_(slots=torch.tensor([slot if slot < 32 else -1 for slot in slots]))
    want = torch.ops.ropepool.rope_pool_fused(*on_cpu.args, **on_cpu.kwargs)
    torch.use_deterministic_algorithms(True)
    try:
        run = record(call)
    finally:
        torch.use_deterministic_algorithms(False)
    repeat = len(set(slots)) < len(slots)
    assert run.torch_calls == {"aten::copy_": 2 if repeat else 1}
    got = (call.k_pool, call.v_pool)
    assert all(torch.equal(pool, wanted) for pool, wanted in zip(got, want[2:], strict=True))


def test_tokens_with_one_slot_spoil_no_other_row():
    """Each element of the row is one of theirs. That threads race for it is what the emulator reports."""
    call = make_sample().with_(slots=torch.tensor([3, 3, 9, -1, 9, 9, 0], dtype=torch.int32))
    before = call.clone()
    with metal_emulator.recording(raises=False) as run:
        _, k_rot, k_pool, v_pool = emulated_mps.call_kernel("rope_pool_fused", arguments(call))
    assert all("race: stores byte" in fault or fault.startswith("and") for fault in run.faults)
    for pool, rows, untouched in ((k_pool, k_rot, before.k_pool), (v_pool, call.v, before.v_pool)):
        for slot in range(32):
            tokens = (call.slots == slot).nonzero().flatten()
            candidates = rows[tokens] if len(tokens) else untouched[slot][None]
            assert (pool[slot] == candidates).any(dim=0).all()


# ---- The contract


@pytest.mark.parametrize("case", list(selftest.broken_calls()), ids=lambda case: case.name)
def test_selftest_refusals(case):
    assert selftest.refusal(case, "cpu", emulated_mps.call) is None


def test_contract_is_the_cpu_kernels():
    """Random calls, most of them broken. float64 is left out: MPS has none."""
    refused = accepted = 0
    for number in range(1500):
        r = random.Random(number)
        spec, op = random_spec(r), r.choice(list(OPS))
        if any(view.dtype == torch.float64 for view in spec.views.values()):
            continue
        call = spec.build(slot=-1)
        keys = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.MPS)
        kernels = [partial(getattr(torch.ops.ropepool, op).default._op_dk, key) for key in keys]
        cpu, mps = (outcome(partial(kernel, *call.args, **call.kwargs)) for kernel in kernels)
        if cpu[0] == "ValueError":
            cpu = "ValueError", str(cpu[1]).replace("float32 or float64, got", "float32, got")
        assert mps == cpu, spec
        refused, accepted = refused + (cpu[0] == "ValueError"), accepted + (cpu[0] == "accepted")
    assert min(refused, accepted) > 200


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("q", "q/k/v dtype must be float16, bfloat16 or float32, got float64"),
        ("inv_freq", "inv_freq must be float32, got float64"),
    ],
)
def test_float64_is_refused(what, text):
    call = make_sample(dtype=torch.float64 if what == "q" else torch.float32)
    if what == "inv_freq":
        call = call.with_(rope_base=None, inv_freq=torch.ones(32, dtype=torch.float64))
    with pytest.raises(ValueError, match=f"^{text}$"):
        emulated_mps.call_kernel("rope_pool_fused", arguments(call))


# ---- What is moved, made and dispatched


def arguments(call: sample.Sample) -> dict[str, object]:
    return {**dict(zip(sample.TENSOR_NAMES, call.args, strict=True)), **call.kwargs}


def record(call: sample.Sample, op: str = "rope_pool_fused", **options) -> metal_emulator.Run:
    """The second call of its kind: what is made once is there."""
    emulated_mps.call(op, arguments(call.clone()))
    with torch.no_grad(), metal_emulator.recording(**options) as run:
        emulated_mps.call_kernel(op, arguments(call))
    return run


SHAPES = {"Llama-3-8B": (32, 8, 128), "SmolLM2-135M": (9, 3, 64), "head_dim 66": (4, 2, 66)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_every_byte_moves_once(shape, dtype, num_tokens):
    heads, kv_heads, head_dim = SHAPES[shape]
    call = make_sample(num_tokens, heads, kv_heads, head_dim, pool_size=160, dtype=dtype)
    (dispatch,) = record(call).dispatches
    moved = {t.name: (t.bytes_loaded, t.bytes_stored) for t in dispatch.buffers.values()}
    q, k = call.q.nbytes, call.k.nbytes
    reads = {"q": q, "k": k, "v": k}
    writes = {"q_rot": q, "k_rot": k, "k_pool": k, "v_pool": k}
    assert {name: moved[name] for name in reads} == {name: (size, 0) for name, size in reads.items()}
    assert {name: moved[name] for name in writes} == {name: (0, size) for name, size in writes.items()}
    per_token = (2 * heads + 5 * kv_heads) * head_dim * dtype.itemsize
    assert sum(reads.values()) + sum(writes.values()) == per_token * num_tokens
    for name in ("positions", "slots", "frequencies"):
        assert dispatch.buffer(name).bytes_reloaded == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 330])
def test_each_angle_is_made_once_in_a_threadgroup(shape, num_tokens):
    heads, kv_heads, head_dim = SHAPES[shape]
    call = make_sample(num_tokens, heads, kv_heads, head_dim, pool_size=330, dtype=torch.bfloat16)
    (dispatch,) = record(call).dispatches
    groups_of_a_token = dispatch.grid[1] // dispatch.group[1]
    times, rest = divmod(dispatch.calls["rope_pool::angle_of"], num_tokens * head_dim // 2)
    assert rest == 0
    assert 2 <= times < groups_of_a_token  # those of q and of k; v's have no angles
    if num_tokens == 330 and shape == "Llama-3-8B":  # tokens enough for the GPU
        assert (times, groups_of_a_token) == (2, 3)


def test_which_kernel_a_layout_gets():
    def kernel(call: sample.Sample) -> str:
        (dispatch,) = record(call).dispatches
        return dispatch.kernel.removeprefix("rope_pool_fused_")

    good = make_sample(dtype=torch.bfloat16)
    kernels = {"contiguous": kernel(good)}
    for offset in (1, 8):
        view = sample.place(good.q, (4 * 64, 64, 1), offset)
        kernels[f"q at offset {offset}"] = kernel(good.with_(q=view))
    kernels["heads of 72"] = kernel(make_sample(head_dim=72, dtype=torch.bfloat16))
    kernels["heads of 80"] = kernel(make_sample(head_dim=80, dtype=torch.bfloat16))
    kernels["float32, heads of 72"] = kernel(make_sample(head_dim=72))
    kernels["rotary_dim 20"] = kernel(good.with_(rotary_dim=20))
    kernels["interleaved"] = kernel(good.with_(interleaved=True))
    for name, buffer, dim in (
        ("pages", torch.zeros(2, 4, 8, 2, 64), 0),
        ("pages apart", torch.zeros(4, 2, 8, 2, 64), 1),
    ):
        k_pool, v_pool = buffer.to(torch.bfloat16).unbind(dim)
        kernels[name] = kernel(good.with_(k_pool=k_pool, v_pool=v_pool, page_size=8))
    for num_tokens in (79, 80):
        kernels[f"{num_tokens} tokens"] = kernel(make_sample(num_tokens, pool_size=80))
    for num_tokens in (319, 320):
        full = make_sample(num_tokens, 8, 8, pool_size=320)
        kernels[f"{num_tokens} tokens that fill groups"] = kernel(full)
    kernels["few tokens, many lanes"] = kernel(make_sample(head_dim=520))
    assert_expected_inline(
        "\n".join(f"{name}: {value}" for name, value in kernels.items()),
        """\
contiguous: bfloat16_few_tokens
q at offset 1: bfloat16_elements
q at offset 8: bfloat16_few_tokens
heads of 72: bfloat16_elements
heads of 80: bfloat16_few_tokens
float32, heads of 72: float32_few_tokens
rotary_dim 20: bfloat16_elements
interleaved: bfloat16_chunks
pages: bfloat16_few_tokens
pages apart: bfloat16_chunks
79 tokens: float32_few_tokens
80 tokens: float32_common
319 tokens that fill groups: float32_few_tokens
320 tokens that fill groups: float32_common
few tokens, many lanes: float32_common""",
    )


@pytest.mark.parametrize("fits", [True, False])
def test_offsets_of_32_bits_only_where_they_fit(fits, tmp_path):
    """Common parameters count chunks of 16 bytes in 32 bits: rows 64 GiB apart, of a sparse file."""
    call = make_sample(num_tokens=2, num_kv_heads=1, dtype=torch.bfloat16, pool_size=2)
    row = call.k_pool[0].numel()
    stride = 8 * 2**32 - row - (8 if fits else 0) + 8
    size = 2 * (stride + row)
    memory = torch.from_file(str(tmp_path / "pools"), shared=True, size=size, dtype=torch.bfloat16)
    pools = [memory.as_strided((2, 1, 64), (stride, 64, 1), at) for at in (0, stride + row)]
    spread = call.with_(k_pool=pools[0], v_pool=pools[1])
    (dispatch,) = record(spread).dispatches
    assert dispatch.kernel.endswith("_few_tokens" if fits else "_chunks")
    want = call.run("_rope_pool_fused")
    for pool, rows in ((pools[0], want[1]), (pools[1], call.v)):
        assert torch.equal(pool[call.slots.long()], rows)


@pytest.mark.parametrize("op", OPS)
def test_one_dispatch_and_nothing_made_but_the_outputs(op):
    call = make_sample()
    run = record(call, op)
    outputs = [] if op == "rope_pool_fused_" else [call.q.nbytes, call.k.nbytes]
    assert (len(run.dispatches), run.command_blocks, run.libraries, run.pipelines) == (1, 1, 0, 0)
    assert run.allocations == outputs
    assert not run.torch_calls  # no copy to the host, no wait for the device


def test_no_tokens_no_dispatch():
    run = record(make_sample(0))
    assert (run.command_blocks, run.dispatches) == (0, [])


@pytest.mark.parametrize("name", ["q", "k", "v", "k_pool", "v_pool"])
def test_strides_that_reach_beyond_2_to_32_elements(name):
    """Where the product of two 32-bit numbers would wrap around. The memory is only reserved."""
    call = make_sample(3, 2, 2, 4, 3, dtype=torch.bfloat16)
    want = selftest.results(selftest.Case("", "", arguments(call)), "_rope_pool_fused", "cpu")
    t = getattr(call, name)
    view = torch.empty(2**32 + 64, dtype=torch.bfloat16).as_strided(t.shape, (2**31, 4, 1)).copy_(t)
    args = {**arguments(call), name: view}
    q_rot, k_rot = emulated_mps.call("_rope_pool_fused", args)
    assert selftest.same_bits(q_rot, want["q_rot"])
    assert selftest.same_bits(k_rot, want["k_rot"])
    for pool in ("k_pool", "v_pool"):
        assert selftest.same_bits(args[pool].flatten(), want[pool])


# ---- In a process of its own: what is decided once


def run_python(code: str, **environment: str) -> str:
    root = emulated_mps.ROOT
    path = os.pathsep.join(str(folder) for folder in (root, root / "tests", root / "tools"))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


SELFTEST = """
import emulated_mps, metal_emulator
from torch_ropepool import selftest
{setup}
for case in selftest.cases():
    if case.kind in ("dtypes", "variants of RoPE", "positions"):
        for op in selftest.OPS[1:]:
            assert selftest.difference(case, op, "cpu", emulated_mps.call) is None
"""


def test_with_set_arg_bytes_of_torch_2_14():
    """No tensor is made for the parameters then, not even at a layout's first call."""
    setup = "emulated_mps.load(set_arg_bytes=True); emulated_mps.load = lambda: None"
    code = (
        SELFTEST.format(setup=setup)
        + """
with metal_emulator.recording() as run:
    emulated_mps.call_kernel("rope_pool_fused_", selftest.make_case("", num_qo_heads=5, rope_base=7.0).args)
print(run.allocations)
"""
    )
    num_pairs = 32
    assert run_python(code) == str([3 * 4 * num_pairs] * 2)  # the table, on the host and on the device


def test_fast_math_changes_no_bit():
    """PYTORCH_MPS_FAST_MATH=1 compiles shaders with fast math; the shader's pragmas take it back."""
    run_python(SELFTEST.format(setup="metal_emulator.compile_options(fast_math=True).__enter__()"))


def test_as_macos_14_compiles_it():
    """MSL 3.1, without the pragmas; torch asks for safe math, and there is no product to contract."""
    run_python(SELFTEST.format(setup="metal_emulator.compile_options(metal_version=310).__enter__()"))


def test_a_gpu_that_flushes_subnormals():
    """Half types are converted with integers, so float16's subnormals survive."""
    for case in selftest.cases():
        if case.has_subnormals and case.args["q"].dtype == torch.float16:
            call = partial(emulated_mps.call, flush_denormals=True)
            assert selftest.difference(case, "rope_pool_fused", "cpu", call) is None


@pytest.mark.parametrize("lazy", [False, True])
def test_a_shader_that_does_not_compile_is_an_error(lazy):
    code = f"""
import emulated_mps, metal_emulator
from torch_ropepool import selftest
emulated_mps.load()
with metal_emulator.compile_options(lazy={lazy}):
    def fail(*_): raise metal_emulator.CompileError("planted")
    metal_emulator._compiler.compile = fail
    for _ in range(2):
        try:
            emulated_mps.call_kernel("rope_pool_fused", selftest.make_case("").args)
        except RuntimeError as error:
            print(error)
"""
    step = (
        "compiling the Metal kernel rope_pool_fused_bfloat16_few_tokens"
        if lazy
        else ("making the Metal shader library")
    )
    lines = run_python(code).splitlines()
    assert len([line for line in lines if line.startswith(f"rope_pool_fused: {step} failed:")]) == 2
    assert len([line for line in lines if "planted" in line]) == 2


FAILING_STEPS = {  # a function of torch's, at which of its calls, and what the error calls it
    ("create_shader_library", 1): "making the Metal shader library",
    ("get_kernel_function", 1): "compiling the Metal kernel rope_pool_fused_bfloat16_few_tokens",
    ("run_command_block", 1): "the command block",
    ("start_encoding", 1): "encoding",
    ("set_arg_tensor", 1): "binding a tensor",
    ("set_arg_tensor", 10): "binding a tensor",
    ("set_arg_tensor", 11): "binding the parameters",
    ("set_arg_int", 1): "binding a number",
    ("set_arg_int", 2): "binding a number",
    ("dispatch_array_with_group_size", 1): "dispatching",
}


@pytest.mark.parametrize("op", OPS)
def test_a_step_of_torchs_that_fails_is_named_and_nothing_is_written(op):
    code = f"""
import emulated_mps, metal_emulator, test_rope_pool_mps
from torch_ropepool import selftest
emulated_mps.load()
for function, at_call in test_rope_pool_mps.FAILING_STEPS:
    case = selftest.make_case("")
    args = selftest.place(case, "cpu").args
    try:
        with metal_emulator.failing("aoti_torch_mps_" + function, at_call):
            emulated_mps.call("{op}", args)
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    for name, value in case.args.items():
        assert not hasattr(value, "dtype") or selftest.same_bits(args[name], value), name
assert selftest.difference(selftest.make_case(""), "{op}", "cpu", emulated_mps.call) is None
"""
    lines = run_python(code).splitlines()
    assert len(lines) == len(FAILING_STEPS)
    for step, line in zip(FAILING_STEPS.values(), lines, strict=True):
        assert line.startswith(f"rope_pool_fused: {step} failed: "), line


def test_more_heads_than_a_gpu_counts_are_refused():
    args = selftest.make_case("", num_tokens=1, num_kv_heads=1, head_dim=2).args
    args.update(q=args["q"][:, :1].expand(1, 2**31, 2), num_qo_heads=2**31)
    with pytest.raises(ValueError, match="too many tokens, heads or features for a GPU"):
        emulated_mps.call_kernel("rope_pool_fused", args)


def test_slots_are_checked_where_asked():
    code = """
import emulated_mps, torch
from torch_ropepool import selftest
args = selftest.make_case("", slots=torch.tensor([1, 2, 32, 3, -1], dtype=torch.int32)).args
before = args["k_pool"].clone()
try:
    emulated_mps.call_kernel("rope_pool_fused", args)
except IndexError as error:
    print(error)
print("written:", not torch.equal(args["k_pool"], before))
"""
    text = "slots[2] is 32, out of range for pool_size 32; a negative slot means: do not store"
    assert run_python(code, TORCH_ROPEPOOL_CHECK_SLOTS="1") == f"{text}\nwritten: False"
    assert run_python(code, TORCH_ROPEPOOL_CHECK_SLOTS="0") == "written: True"


def test_first_use_from_many_threads():
    code = """
import threading, emulated_mps, torch
from torch_ropepool import selftest
emulated_mps.load()
cases = [make for make in selftest.cases() if make.kind == "dtypes"]
wrong, start = [], threading.Barrier(8)
def work(case):
    start.wait()
    wrong.append(selftest.difference(case, "rope_pool_fused", "cpu", emulated_mps.call_kernel))
threads = [threading.Thread(target=work, args=(cases[i % len(cases)],)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong)
"""
    assert run_python(code) == str([None] * 8)


@pytest.mark.parametrize("op", OPS)
def test_what_the_schema_and_the_fake_kernel_promise(op):
    """Only what the schema marks is written; the outputs look as the fake kernel says and alias nothing."""
    schema = getattr(torch.ops.ropepool, op).default._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for case in selftest.cases():
        if case.kind not in ("dtypes", "token counts", "variants of RoPE"):
            continue
        args = selftest.place(case, "cpu").args
        before = {name: t.clone() for name, t in args.items() if isinstance(t, torch.Tensor)}
        versions = {name: t._version for name, t in args.items() if isinstance(t, torch.Tensor)}
        returned = emulated_mps.call(op, args) or ()
        for name, t in before.items():
            assert name in written or selftest.same_bits(args[name], t), name
            assert (args[name]._version > versions[name]) == (name in written), name
        on_meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in case.args.items()}
        fake = selftest.call_op(op, on_meta) or ()
        storages = {t.untyped_storage()._cdata for t in before.values()}
        for got, want in zip(returned, fake, strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
        for got in returned[:2]:
            assert got.is_contiguous()
            assert got.untyped_storage()._cdata not in storages
