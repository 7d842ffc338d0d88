"""Random broken calls: the compiled kernel, the fake kernel and meta tensors agree on every one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from sample import OPS, TENSOR_NAMES, CallSpec, Sample, ViewSpec, contiguous_strides, make_spec
from torch._subclasses import FakeTensor, FakeTensorMode

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SEED = 20250101
NUM_CASES = 8000
FLOATS = ("q", "k", "v", "k_pool", "v_pool")
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
# There are no fake tensors of quantized dtypes.
UNQUANTIZED = [d for d in DTYPES if not str(d).startswith(("torch.q", "torch.quint"))]

# ---- Mutations: each changes one thing, some of them legally


def rank(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    view.shape = r.choice([(*view.shape, 1), (1, *view.shape), view.shape[1:], view.shape[:-1]])
    view.strides = None


def packed_or_batched(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(FLOATS)]
    if len(view.shape) == 3:
        n, heads, head_dim = view.shape
        view.shape = r.choice([(n, heads * head_dim), (1, n, heads, head_dim)])
        view.strides = None


def size(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    if view.shape:
        d = r.randrange(len(view.shape))
        new = r.choice([0, 1, view.shape[d] + 1, view.shape[d] * 2])
        view.shape = (*view.shape[:d], new, *view.shape[d + 1 :])


def one_dtype(r: random.Random, spec: CallSpec) -> None:
    spec.views[r.choice(TENSOR_NAMES)].dtype = r.choice(UNQUANTIZED)


def float_dtype(r: random.Random, spec: CallSpec) -> None:
    dtype = r.choice([torch.float16, torch.bfloat16, torch.float64, r.choice(UNQUANTIZED)])
    for name in FLOATS[: r.choice([3, 5, 5])]:
        spec.views[name].dtype = dtype


def keyword(r: random.Random, spec: CallSpec) -> None:
    name = r.choice(["head_dim", "num_qo_heads", "num_kv_heads"])
    spec.kwargs[name] = r.choice([-4, -1, 0, 1, 3, spec.kwargs[name] * 2])


def swapped_heads(r: random.Random, spec: CallSpec) -> None:
    kwargs = spec.kwargs
    kwargs["num_qo_heads"], kwargs["num_kv_heads"] = kwargs["num_kv_heads"], kwargs["num_qo_heads"]


def another_model(r: random.Random, spec: CallSpec) -> None:
    """Sizes that agree, but may be illegal."""
    sizes = {
        "head_dim": r.choice([0, 1, 2, 5, 6]),
        "num_qo_heads": r.choice([0, 1, 3]),
        "num_kv_heads": r.choice([0, 1, 2]),
    }
    for name in r.sample(sorted(sizes), r.choice([1, 1, 2, 3])):
        spec.kwargs[name] = sizes[name]
    kwargs = spec.kwargs
    for name in FLOATS:
        heads = kwargs["num_qo_heads"] if name == "q" else kwargs["num_kv_heads"]
        # A keyword that was made negative before is no size.
        spec.views[name].shape = (spec.views[name].shape[0], max(heads, 0), max(kwargs["head_dim"], 0))
        spec.views[name].strides = None


def rope_base(r: random.Random, spec: CallSpec) -> None:
    spec.kwargs["rope_base"] = r.choice(
        [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -1.0, -1e-320, -123456.789, 1e-3, 5e5, 1e300]
    )


def any_strides(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    view.strides = tuple(r.choice([0, 1, 2, 3, 8, 16, 17, 64, 100]) for _ in view.shape)


def transposed(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    order = r.sample(range(len(view.shape)), len(view.shape))
    dense = contiguous_strides(tuple(view.shape[d] for d in order))
    view.strides = tuple(dense[order.index(d)] for d in range(len(order)))


def spread(r: random.Random, spec: CallSpec) -> None:
    """Contiguous strides, times a number."""
    view = spec.views[r.choice(TENSOR_NAMES)]
    factor = r.choice([2, 3])
    view.strides = tuple(factor * stride for stride in contiguous_strides(view.shape))


def expanded(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    if view.shape:
        d = r.randrange(len(view.shape))
        strides = list(contiguous_strides(view.shape))
        strides[d] = 0
        view.strides = tuple(strides)


def moved(r: random.Random, spec: CallSpec) -> None:
    """One tensor into another's storage."""
    guest, host = r.sample(TENSOR_NAMES, 2)
    view = spec.views[guest]
    view.buffer = spec.views[host].buffer
    view.offset = r.choice([0, 1, 2, r.randrange(16), r.randrange(200)])


def common_buffer(r: random.Random, spec: CallSpec) -> None:
    """Some tensors in one storage, one after the other, with gaps or overlaps."""
    offset = 0
    for name in r.sample(TENSOR_NAMES, r.randrange(2, 8)):
        view = spec.views[name]
        view.buffer = "common"
        view.offset = max(0, offset // view.dtype.itemsize + r.choice([-1, 1, 1, 1, 1, 8]))
        offset = view.end


def interleaved(r: random.Random, spec: CallSpec) -> None:
    """Pairs of tensors of one shape as columns of one buffer, at times a column too close."""
    for a, b in r.sample([("k_pool", "v_pool"), ("k", "v"), ("positions", "slots")], r.choice([1, 2])):
        one, other = spec.views[a], spec.views[b]
        if one.shape != other.shape or not one.shape:
            continue
        d = r.randrange(len(one.shape))
        dense = contiguous_strides((*one.shape[:d], 2, *one.shape[d:]))
        one.strides = other.strides = (*dense[:d], *dense[d + 1 :])
        one.buffer = other.buffer = a + b
        one.offset, other.offset = 0, max(0, dense[d] - r.choice([0, 0, 0, 1]))


def freed_storage(r: random.Random, spec: CallSpec) -> None:
    spec.views[r.choice(TENSOR_NAMES)].storage_bytes = 0


def cut_storage(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    view.storage_bytes = max(0, view.end - r.choice([-1, 0, 1, 2, 9]))


def offset(r: random.Random, spec: CallSpec) -> None:
    spec.views[r.choice(TENSOR_NAMES)].offset += r.choice([1, 3, 8])


def on_meta(r: random.Random, spec: CallSpec) -> None:
    spec.views[r.choice(TENSOR_NAMES)].device = "meta"


# ---- Mutations of the keyword arguments with defaults


def rotary_dim(r: random.Random, spec: CallSpec) -> None:
    head_dim = spec.kwargs["head_dim"]
    spec.kwargs["rotary_dim"] = r.choice([-2, 0, 1, 2, head_dim - 1, head_dim, head_dim, head_dim + 2])


def attention_scaling(r: random.Random, spec: CallSpec) -> None:
    spec.kwargs["attention_scaling"] = r.choice([0.0, 1.2, -1.0, 3.5e38, 1e39, float("nan"), float("-inf")])


def pairs(r: random.Random, spec: CallSpec) -> None:
    spec.kwargs[r.choice(["interleaved", "interleaved", "mrope_interleaved"])] = r.choice([False, True])


def paged(r: random.Random, spec: CallSpec) -> None:
    page_size = r.choice([1, 2, 3])
    for name in ("k_pool", "v_pool"):
        view = spec.views[name]
        if len(view.shape) == 3:
            view.shape, view.strides = (view.shape[0], page_size, *view.shape[1:]), None
    spec.kwargs["page_size"] = r.choice([page_size, page_size, page_size, 0, -1, page_size + 1, None])


def mrope(r: random.Random, spec: CallSpec) -> None:
    half = spec.kwargs["head_dim"] // 2
    section = r.choice([[half, 0, 0], [0, half, 0], [half - 1, 1, 0]])
    spec.kwargs["mrope_section"] = r.choice(
        [section, section, section, [half], [half, 1, -1], [half, 0, 1], None]
    )
    spec.kwargs["mrope_interleaved"] = r.choice([False, False, True])
    view = spec.views["positions"]
    view.shape, view.strides = (r.choice([3, 3, 3, 3, 2]), *view.shape[-1:]), None


def inv_freq(r: random.Random, spec: CallSpec) -> None:
    half = spec.kwargs["head_dim"] // 2
    shape = r.choice([(half,), (half,), (half,), (half,), (half + 1,), (half, 1), ()])
    dtype = r.choice([torch.float32, torch.float32, torch.float64, torch.float64, r.choice(UNQUANTIZED)])
    spec.views["inv_freq"] = ViewSpec(shape, dtype, "inv_freq", offset=r.choice([0, 0, 3]))
    if r.random() < 0.8:
        spec.kwargs["rope_base"] = None


def inv_freq_moved(r: random.Random, spec: CallSpec) -> None:
    inv_freq(r, spec)
    view = spec.views["inv_freq"]
    view.buffer = spec.views[r.choice(TENSOR_NAMES)].buffer
    view.offset = r.randrange(32)


def inv_freq_otherwise(r: random.Random, spec: CallSpec) -> None:
    inv_freq(r, spec)
    view = spec.views["inv_freq"]
    if r.random() < 0.5:
        view.storage_bytes = max(0, view.end - r.choice([0, 1, 4]))
    else:
        view.strides = tuple(r.choice([0, 1, 2, 5]) for _ in view.shape)


def no_frequencies(r: random.Random, spec: CallSpec) -> None:
    spec.kwargs["rope_base"] = None


MUTATIONS: list[Callable[[random.Random, CallSpec], None]] = [
    rank,
    packed_or_batched,
    size,
    one_dtype,
    float_dtype,
    keyword,
    swapped_heads,
    another_model,
    rope_base,
    any_strides,
    transposed,
    spread,
    expanded,
    moved,
    moved,
    moved,
    common_buffer,
    common_buffer,
    interleaved,
    interleaved,
    freed_storage,
    cut_storage,
    offset,
    on_meta,
]
VARIANTS: list[Callable[[random.Random, CallSpec], None]] = [
    rotary_dim,
    attention_scaling,
    pairs,
    paged,
    paged,
    mrope,
    mrope,
    inv_freq,
    inv_freq,
    inv_freq_moved,
    inv_freq_moved,
    inv_freq_otherwise,
    no_frequencies,
]


def share_buffers(spec: CallSpec) -> None:
    """A buffer has one device and is cut once."""
    for view in spec.views.values():
        sharing = [other for other in spec.views.values() if other.buffer == view.buffer]
        view.device = sharing[0].device
        view.storage_bytes = next((v.storage_bytes for v in sharing if v.storage_bytes is not None), None)


def random_spec(r: random.Random) -> CallSpec:
    spec = make_spec(
        num_tokens=r.choice([0, 1, 2, 3, 5]),
        num_qo_heads=r.choice([1, 2, 4]),
        num_kv_heads=r.choice([1, 2]),
        head_dim=r.choice([2, 4, 8]),
        pool_size=r.choice([0, 1, 4, 6]),
        index_dtype=r.choice([torch.int32, torch.int64]),
        rope_base=r.choice([1e4, 5e5]),
    )
    for mutation in r.choices(VARIANTS, k=r.choice([0, 0, 1, 2, 3])):
        mutation(r, spec)
    if not spec.has_variants() or r.random() < 0.5:
        for mutation in r.choices(MUTATIONS, k=r.choice([1, 1, 2, 3])):
            mutation(r, spec)
    share_buffers(spec)
    if all(view.device == "meta" for view in spec.views.values()):  # no call for the CPU kernel
        for view in spec.views.values():
            view.device = "cpu"
    return spec


# ---- Outcomes

Outcome = tuple[str, object]


def outcome(call: Callable[[], object]) -> Outcome:
    """The error's type and text, or what the results look like."""
    try:
        results = call() or ()
    except Exception as error:
        return type(error).__name__, str(error)
    return "accepted", tuple((tuple(t.shape), t.stride(), t.dtype) for t in results)


def partition(sample: Sample) -> list[int]:
    """For each tensor, the first that has the same storage."""
    storages = [t.untyped_storage()._cdata for t in sample.tensors]
    return [storages.index(storage) for storage in storages]


def cpu_outcome(op: str, sample: Sample) -> Outcome:
    """Of the compiled kernel, even where one tensor is on meta."""
    kernel = OPS[op].default._op_dk
    return outcome(lambda: kernel(torch._C.DispatchKey.CPU, *sample.args, **sample.kwargs))


@dataclass
class Case:
    number: int
    op: str
    spec: CallSpec
    cpu: Outcome
    fake: Outcome
    meta: Outcome | None
    from_tensor: Outcome | None  # on fake tensors that were made of the real ones

    @property
    def agreed(self) -> bool:
        return {self.fake, self.meta or self.cpu, self.from_tensor or self.cpu} == {self.cpu}

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {SEED}, case {self.number}: {self.op} {self.spec.kwargs}",
                *(f"  {name}: {view}" for name, view in self.spec.views.items()),
                *(f"  {way} said: {getattr(self, way)}" for way in ("cpu", "fake", "meta", "from_tensor")),
            ]
        )


def run_case(number: int) -> Case:
    r = random.Random(SEED * 1_000_000 + number)
    spec = random_spec(r)
    op = r.choice(list(OPS))
    slot = 0 if 0 not in spec.views["k_pool"].shape[:2] else -1  # always legal
    real = spec.build(slot=slot)
    meta_sample = spec.build("meta")
    # As FakeTensorMode.from_tensor makes them, in a tenth of the time, and a storage that was cut stays so.
    mode = FakeTensorMode()
    devices = (torch.device(view.device) for view in spec.views.values())  # in the order of map
    fake_sample = meta_sample.map(lambda t: FakeTensor(mode, t, next(devices)))
    assert partition(fake_sample) == partition(meta_sample) == partition(real)

    fake = outcome(lambda: OPS[op](*fake_sample.args, **fake_sample.kwargs))
    meta = None
    if all(view.device == "cpu" for view in spec.views.values()):
        meta = outcome(lambda: OPS[op](*meta_sample.args, **meta_sample.kwargs))
    from_tensor = None
    # It makes a storage that was cut whole again.
    if number % 10 == 0 and not any(view.storage_bytes for view in spec.views.values()):
        converted = real.map(FakeTensorMode().from_tensor)
        assert partition(converted) == partition(real)
        from_tensor = outcome(lambda: OPS[op](*converted.args, **converted.kwargs))
    return Case(number, op, spec, cpu_outcome(op, real), fake, meta, from_tensor)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [run_case(number) for number in range(NUM_CASES)]


def test_fake_and_meta_kernels_say_what_the_compiled_one_says(cases: list[Case]) -> None:
    wrong = [case for case in cases if not case.agreed]
    assert not wrong, f"{len(wrong)} cases, the first:\n" + "\n".join(map(str, wrong[:3]))


def test_a_broken_call_is_a_value_error(cases: list[Case]) -> None:
    wrong = [case for case in cases if case.cpu[0] not in ("accepted", "ValueError")]
    assert not wrong, f"{len(wrong)} cases, the first:\n" + "\n".join(map(str, wrong[:3]))


# ---- The cases are worth something

PREFIXES = [
    "rope_pool_fused expects q/k/v to be 3-D",
    "rope_pool_fused expects positions/slots to be 1-D",
    "rope_pool_fused expects pool tensors to be 3-D",
    "q shape must be [num_tokens, num_qo_heads, head_dim], got",
    "k shape must be [num_tokens, num_kv_heads, head_dim], got",
    "v shape must match k shape, got",
    "positions/slots must have one entry per token",
    "k_pool has incompatible shape [",
    "v_pool shape must match k_pool shape, got",
    "q/k/v dtypes must match",
    "pool dtypes must match q/k/v dtype",
    "q/k/v dtype must be float16, bfloat16 or float32",
    "positions/slots must be int32 or int64",
    "head_dim must be even",
    "num_qo_heads must be at least 1",
    "num_kv_heads must be at least 1",
    "rope_base must be finite and positive",
    "all tensors must be on one device",
    *(f"{name} needs a storage of" for name in (*TENSOR_NAMES, "inv_freq")),
    *(f"{name} must not overlap itself" for name in ("q", "k", "k_pool", "v_pool")),
    "k_pool and v_pool must not overlap",
    *(f"{pool} and {name} must not overlap" for pool in ("k_pool", "v_pool") for name in TENSOR_NAMES[:5]),
    "q and k must not overlap",
    *(f"{name} and {other} must not overlap" for name in "qk" for other in ("v", "positions", "slots")),
    "positions must be [3, num_tokens], got",
    "rope_pool_fused expects pool tensors to be 4-D",
    "exactly one of rope_base and inv_freq must be given, got both",
    "exactly one of rope_base and inv_freq must be given, got neither",
    "inv_freq shape must be [rotary_dim / 2], got",
    "inv_freq must be float32 or float64, got",
    *(f"{name} and inv_freq must not overlap" for name in ("k_pool", "v_pool", "q", "k")),
    "attention_scaling must be finite in float32, got",
    "rotary_dim must be even, at least 2 and at most head_dim, got",
    "page_size must be k_pool.shape[1] and at least 1, got",
    "mrope_interleaved needs mrope_section",
    "mrope_section must be 3 counts that sum up to rotary_dim / 2, got",
]
HINTS = [
    "\nhint: the heads of",
    "has a batch dimension; pass",
    "\nhint: num_qo_heads and num_kv_heads look swapped",
    "\nhint: for a paged pool, pass page_size=",
]


def test_every_message_occurs(cases: list[Case]) -> None:
    texts = [case.cpu[1] for case in cases if case.cpu[0] == "ValueError"]
    assert [prefix for prefix in PREFIXES if not any(text.startswith(prefix) for text in texts)] == []
    assert [hint for hint in HINTS if not any(hint in text for text in texts)] == []
    assert [text for text in texts if not text.startswith(tuple(PREFIXES))] == []


def test_a_good_part_of_the_cases_is_accepted(cases: list[Case]) -> None:
    for op in OPS:
        accepted = [case.cpu[0] == "accepted" for case in cases if case.op == op]
        assert sum(accepted) >= 0.1 * len(accepted)


def test_every_kernel_was_asked(cases: list[Case]) -> None:
    for way, part in (("meta", 0.8), ("from_tensor", 0.08)):
        assert sum(getattr(case, way) is not None for case in cases) >= part * len(cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_called_by_its_python_name(dtype: torch.dtype) -> None:
    spec = make_spec(head_dim=2)
    spec.views["k"].dtype = dtype
    expected = f"q/k/v dtypes must match, got q float32, k {str(dtype).removeprefix('torch.')}, v float32"
    for device in ("cpu", "meta"):
        said = outcome(lambda device=device: spec.build(device).run())
        assert said[0] == "accepted" if dtype == torch.float32 else said == ("ValueError", expected)
