"""Which test notices which fault: plants faults one at a time in a copy of the tree, and prints a table.

A fault is planted, the library rebuilt, and a selection of the tests run until one fails. The exit status
is 1 if a fault is noticed by no test. Stops if the tests fail without a fault, or if a fault does not build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 30  # at most, for one run of the tests
TEST_ID = r"tests/\S+?::\w+(?:\[.*?\](?=\s|$))?"  # parameters may have spaces

CONTRACT = "torch_ropepool/csrc/contract.cpp"
CPU = "torch_ropepool/csrc/cpu/rope_pool_cpu.cpp"
FREQUENCIES = "torch_ropepool/csrc/frequency_table.cpp"
INDICES = "torch_ropepool/csrc/index_array.h"
GPU_TABLES = "torch_ropepool/csrc/gpu_tables.cpp"
KERNEL = "torch_ropepool/csrc/rope_pool_kernel.h"
MATH = "torch_ropepool/csrc/rope_math.h"
OPS = "torch_ropepool/csrc/rope_pool_ops.h"
OVERLAP = "torch_ropepool/csrc/overlap.cpp"
PLAN = "torch_ropepool/csrc/rope_pool_plan.cpp"
TENSORS = "torch_ropepool/csrc/tensor_args.cpp"
TOKENS = "torch_ropepool/csrc/cpu/rope_pool_tokens.h"


@dataclass(frozen=True)
class Mutation:
    """A fault: text that occurs once in a file, what to put there, and the test files that should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def cpu(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, tests or ("tests/test_rope_pool.py",))


def gpu(name: str, file: str, old: str, new: str) -> Mutation:
    """Run on the Metal emulator."""
    return Mutation(f"GPU: {name}", file, old, new, ("tests/test_rope_pool_mps.py",))


MUTATIONS = [
    cpu("slot pool_size accepted", PLAN, "if (slot >= pool_size) {", "if (slot > pool_size) {"),
    cpu(
        "slots checked after the write",
        CPU,
        "const bool increasing = check_slots(launch.slots, num_tokens, args.pool_size());",
        """struct AtEnd {
      IndexArray slots;
      i64 num_tokens, pool_size;
      ~AtEnd() noexcept(false) { check_slots(slots, num_tokens, pool_size); }
    } at_end{launch.slots, num_tokens, args.pool_size()};
    const bool increasing = false;""",
    ),
    cpu(
        "contract checked after the write",
        OPS,
        """check(call, /*in_place=*/true);
    launch(call, call.args.q, call.args.k, /*in_place=*/true);""",
        """call.view_tensors();
    launch(call, call.args.q, call.args.k, /*in_place=*/true);
    check(call, /*in_place=*/true);""",
        "tests/test_contract.py",
    ),
    cpu(
        "row of a pool in 32 bits",
        TOKENS,
        "slot % p.page_size * strides.row;",
        "static_cast<i32>(slot % p.page_size * strides.row);",
    ),
    cpu(
        "offset of an index in 32 bits",
        INDICES,
        "const i64 offset = row * row_stride + token * token_stride;",
        "const i32 offset = static_cast<i32>(row * row_stride + token * token_stride);",
    ),
    cpu(
        "pools may overlap each other",
        CONTRACT,
        "check_no_overlap(a.k_pool, a.v_pool);",
        "",
        "tests/test_contract.py",
    ),
    cpu(
        "q may overlap itself in place", CONTRACT, "check_no_self_overlap(a.q);", "", "tests/test_contract.py"
    ),
    cpu(
        "self-overlap with negative steps missed",
        OVERLAP,
        "sum.add(terms[i].stride, 2 * terms[i].last);",
        "sum.add(terms[i].stride, terms[i].last);",
        "tests/test_overlap.py",
    ),
    cpu("an earlier token of a slot stays", CPU, "if (!increasing) {", "if (false) {"),
    cpu(
        "equal neighbours among the slots taken for distinct",
        PLAN,
        "slot > previous;",
        "slot >= previous;",
    ),
    cpu(
        "slots before and after a negative one taken for distinct",
        PLAN,
        "if (slot < 0) continue;\n    if (slot >= pool_size) {",
        "if (slot < 0) previous = -1;\n    if (slot < 0) continue;\n    if (slot >= pool_size) {",
    ),
    cpu(
        "stride of the features ignored",
        PLAN,
        "return {t.strides[0], t.strides[1], t.strides[2]};",
        "return {t.strides[0], t.strides[1], 1};",
    ),
    cpu("stride of the indices ignored", INDICES, "t.strides[t.ndim - 1]}", "1}"),
    cpu(
        "storage offset ignored",
        TENSORS,
        "TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &view.data));",
        """TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &view.data));
  view.data = static_cast<char*>(view.data) - view.storage_offset * view.itemsize;""",
    ),
    cpu(
        "storage offset ignored by the check of the storage",
        CONTRACT,
        "t.storage_offset * t.itemsize + extent",
        "extent",
        "tests/test_contract.py",
    ),
    cpu(
        "half of the head taken for half of what turns",
        PLAN,
        "p.pair_distance = args.interleaved ? 1 : p.num_pairs;",
        "p.pair_distance = args.interleaved ? 1 : p.head_dim / 2;",
        "tests/test_variants.py",
    ),
    cpu(
        "k stored unrotated",
        TOKENS,
        "store_head(token_k_rot, p.k_rot, k_row,",
        "store_head(token_k, p.k, k_row,",
    ),
    cpu(
        "dtype of v_pool not checked",
        CONTRACT,
        " || a.v_pool.scalar_type != a.q.scalar_type) {",
        ") {",
        "tests/test_contract.py",
    ),
    cpu("write to v_pool not recorded", OPS, "record_write(call.v_pool);", ""),
    cpu(
        "write recorded after it, which may fail",
        CPU,
        "before_write();\n      tokens(launch, 0, num_tokens);",
        "tokens(launch, 0, num_tokens);\n      before_write();",
        "tests/test_failures.py",
    ),
    cpu(
        "tokens that may share a slot looked for after the write",
        CPU,
        "stored = last_writers(launch.slots, num_tokens);",
        "tokens(launch, 0, num_tokens);\n      stored = last_writers(launch.slots, num_tokens);",
        "tests/test_failures.py",
    ),
    cpu(
        "rows stored in whole vectors, beyond their end",
        TOKENS,
        " || size % Block::kBytes != 0",
        "",
        "tests/test_guard_pages.py",
    ),
    cpu(
        "a row's copy a byte too long",
        TOKENS,
        "std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Storage));",
        "std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Storage) + 1);",
        "tests/test_guard_pages.py",
    ),
    cpu(
        "a word read as two",
        TOKENS,
        """  u32 word;
  std::memcpy(&word, x, sizeof word);
  return word;""",
        """  u64 words;
  std::memcpy(&words, x, sizeof words);
  return static_cast<u32>(words) ^ (words >> 32 == 0x12345678u);""",
        "tests/test_guard_pages.py",
    ),
    cpu(
        "bfloat16 ties rounded up",
        MATH,
        "0x7fffu + ((bits >> 16) & 1u)",
        "0x8000u",
        "tests/test_rope_math.py",
    ),
    cpu("negative positions off by a turn's part", MATH, "position < 0 ? low : 0u;", "0u;"),
    cpu(
        "mrope's second run ends too early",
        MATH,
        "pair < section0 + section1 ? 1 : 2",
        "pair < section1 ? 1 : 2",
        "tests/test_variants.py",
    ),
    gpu("slot pool_size stored", KERNEL, "row < p.pool_size)", "row <= p.pool_size)"),
    gpu("slot's upper bound not checked", KERNEL, "if (row >= 0 && row < p.pool_size) {", "if (row >= 0) {"),
    gpu("negative slot stored", KERNEL, "if (row >= 0 && row < p.pool_size) {", "if (row < p.pool_size) {"),
    gpu(
        "offsets in 32 bits, not 64",
        KERNEL,
        "return (i64)((u64)index * (u64)stride);",
        "return (i64)(index * (u32)stride);",
    ),
    gpu(
        "32-bit form where offsets do not fit",
        PLAN,
        "is_common = is_common && has_short_offsets(*t, kVectorBytes);",
        "",
    ),
    gpu(
        "upper half of an index left out",
        KERNEL,
        "(i64)((u64)index.high << 32 | index.low)",
        "(i64)(u64)index.low",
    ),
    gpu("no barrier", KERNEL, "    ROPE_POOL_BARRIER();\n", ""),
    gpu("lane's second chunk in the wrong place", KERNEL, "f.turns ? turning : 1u;", "turning;"),
    gpu(
        "half of the head taken for half of what turns",
        KERNEL,
        "f.distance = apart ? p.num_pairs : kVec;",
        "f.distance = apart ? p.head_dim / 2 : kVec;",
    ),
    gpu("mrope's third position is the second", KERNEL, "offset + 2 * step", "offset + step"),
    gpu("stride of the features ignored", KERNEL, "kVec > 1 ? 1 : feature_stride;", "1;"),
    gpu(
        "slots that repeat left to a race where determinism is asked",
        GPU_TABLES,
        "if (!wants_determinism) return nullptr;",
        "return nullptr;",
    ),
    gpu("page ignored", KERNEL, "i64 offset = page * h.pool.page + ", "i64 offset = "),
    gpu("16-byte accesses at any address", PLAN, "t.byte_address % kVectorBytes != 0", "false"),
    gpu(
        "k stored unrotated",
        KERNEL,
        """if (!is_v && f.turns) lane = Turn<Element, kVec>::apply(lane, is_interleaved(p), angles);
    store_lane(lane, out, head);
    store_lane(lane, pool, head);""",
        """store_lane(lane, pool, head);
    if (!is_v && f.turns) lane = Turn<Element, kVec>::apply(lane, is_interleaved(p), angles);
    store_lane(lane, out, head);""",
    ),
    gpu(
        "features that do not turn left out",
        PLAN,
        "q_rot.handle == args.q.handle ? 1 : 0;",
        "1;",
    ),
]


def mutated(mutation: Mutation, root: Path) -> str:
    """The file's text with the fault in it."""
    text = (root / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        sys.exit(f"{mutation.name}: {mutation.file} must have its text once, has it {count} times")
    return text.replace(mutation.old, mutation.new)


def copy_tree(to: Path) -> None:
    """What git knows, with changes that are not committed, and new files that it does not ignore."""
    list_files = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(list_files, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)  # with its time, so that ninja compiles what changed


def run(command: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ninja
        "PYTHONPATH": str(root),
        "TORCH_ROPEPOOL_CUDA": "0",
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * MINUTES,
    )


def build(root: Path) -> None:
    result = run(["setup.py", "-q", "build_ext", "--inplace"], root)
    if result.returncode != 0:
        sys.exit(f"the library does not build:\n{result.stdout}")


def failing_test(tests: tuple[str, ...], root: Path) -> str | None:
    """The first, by its id, or None."""
    result = run(["-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", *tests], root)
    if result.returncode == 0:
        return None
    if found := re.search(rf"^FAILED ({TEST_ID})", result.stdout, re.MULTILINE):
        return found[1]
    # A crash ends the output after the id of the test. Anything else is a broken run, such as a fault
    # that the emulator cannot compile.
    started = re.findall(rf"^{TEST_ID}", result.stdout, re.MULTILINE)
    if result.returncode < 0 and started:
        return f"{started[-1]} (crash: signal {-result.returncode})"
    sys.exit(f"the tests did not run:\n{result.stdout[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="the faults with this in their name"
    )
    parser.add_argument("--no-check", action="store_true", help="leave out the run without a fault")
    options = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if any(text in mutation.name for text in options.only)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        copy_tree(root)
        build(root)
        tests = tuple(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        if not options.no_check and (failed := failing_test(tests, root)):
            sys.exit(f"without a fault, {failed} fails")
        print("| Fault | File | Caught by |\n|---|---|---|", flush=True)
        for mutation in mutations:
            path = root / mutation.file
            text = path.read_text()
            path.write_text(mutated(mutation, root))
            build(root)
            caught_by = failing_test(mutation.tests, root)
            path.write_text(text)
            survivors += caught_by is None
            print(f"| {mutation.name} | {mutation.file} | {caught_by or 'SURVIVED'} |", flush=True)
    print(f"\n{len(mutations) - survivors} of {len(mutations)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
