"""The ops in graphs: schemas, exported and compiled graphs, symbolic sizes."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from checks import TORCH, assert_same_bits
from expecttest import assert_expected_inline
from sample import OPS, TENSOR_NAMES, Sample, bits, make_sample
from torch._inductor.utils import fresh_inductor_cache
from torch.fx.experimental.proxy_tensor import make_fx

BACKENDS = ("eager", "aot_eager", "inductor")
PUBLIC_OPS = ("rope_pool_fused", "rope_pool_fused_")
KWARGS = make_sample().kwargs


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Inductor's caches do not see a change of a composite or of a fake kernel."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with fresh_inductor_cache():
        yield


def module_of(op: str, kwargs: dict[str, object]) -> torch.nn.Module:
    class Module(torch.nn.Module):
        def forward(self, q, k, v, positions, slots, k_pool, v_pool):
            return OPS[op](q, k, v, positions, slots, k_pool, v_pool, **kwargs)

    return Module()


def graph_text(module: torch.fx.GraphModule) -> str:
    """The graph's code without comments and the lines that free names."""
    lines = [line.split("#")[0].split(";  ")[0].rstrip() for line in module.code.strip().splitlines()]
    return "\n".join(line for line in lines if line)


def assert_equal_calls(got: Sample, want: Sample) -> None:
    for a, b in zip(got.args, want.args, strict=True):
        assert_same_bits(a, b)


# ---- Exact texts


def test_schemas():
    assert_expected_inline(
        "\n".join(str(op.default._schema) for op in OPS.values()),
        """\
ropepool::rope_pool_fused(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor slots, Tensor(a!) k_pool, Tensor(b!) v_pool, *, SymInt head_dim, SymInt num_qo_heads, SymInt num_kv_heads, float? rope_base=None, Tensor? inv_freq=None, float attention_scaling=1., SymInt? rotary_dim=None, bool interleaved=False, SymInt? page_size=None, int[]? mrope_section=None, bool mrope_interleaved=False) -> (Tensor q_rot, Tensor k_rot, Tensor(a!) k_pool_new, Tensor(b!) v_pool_new)
ropepool::_rope_pool_fused(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor slots, Tensor(a!) k_pool, Tensor(b!) v_pool, *, SymInt head_dim, SymInt num_qo_heads, SymInt num_kv_heads, float? rope_base=None, Tensor? inv_freq=None, float attention_scaling=1., SymInt? rotary_dim=None, bool interleaved=False, SymInt? page_size=None, int[]? mrope_section=None, bool mrope_interleaved=False) -> (Tensor q_rot, Tensor k_rot)
ropepool::rope_pool_fused_(Tensor(a!) q, Tensor(b!) k, Tensor v, Tensor positions, Tensor slots, Tensor(c!) k_pool, Tensor(d!) v_pool, *, SymInt head_dim, SymInt num_qo_heads, SymInt num_kv_heads, float? rope_base=None, Tensor? inv_freq=None, float attention_scaling=1., SymInt? rotary_dim=None, bool interleaved=False, SymInt? page_size=None, int[]? mrope_section=None, bool mrope_interleaved=False) -> ()""",
    )


def exported(op: str, *, strict: bool) -> torch.export.ExportedProgram:
    call = make_sample()
    num_tokens = torch.export.Dim("num_tokens")
    dynamic = {name: {0: num_tokens} for name in ("q", "k", "v", "positions", "slots")}
    return torch.export.export(
        module_of(op, call.kwargs),
        call.args,
        dynamic_shapes={name: dynamic.get(name) for name in TENSOR_NAMES},
        strict=strict,
    )


def test_exported_graph():
    assert_expected_inline(
        graph_text(exported("rope_pool_fused", strict=False).graph_module),
        """\
def forward(self, q, k, v, positions, slots, k_pool, v_pool):
    rope_pool_fused = torch.ops.ropepool.rope_pool_fused.default(q, k, v, positions, slots, k_pool, v_pool, head_dim = 64, num_qo_heads = 4, num_kv_heads = 2, rope_base = 10000.0)
    getitem = rope_pool_fused[0]
    getitem_1 = rope_pool_fused[1]
    getitem_2 = rope_pool_fused[2]
    getitem_3 = rope_pool_fused[3]
    return (getitem, getitem_1, getitem_2, getitem_3)""",
    )


def test_exported_graph_strict():
    assert_expected_inline(
        graph_text(exported("rope_pool_fused", strict=True).graph_module),
        """\
def forward(self, q, k, v, positions, slots, k_pool, v_pool):
    rope_pool_fused = torch.ops.ropepool.rope_pool_fused.default(q, k, v, positions, slots, k_pool, v_pool, head_dim = 64, num_qo_heads = 4, num_kv_heads = 2, rope_base = 10000.0)
    getitem = rope_pool_fused[0]
    getitem_1 = rope_pool_fused[1]
    getitem_2 = rope_pool_fused[2]
    getitem_3 = rope_pool_fused[3]
    return (getitem, getitem_1, getitem_2, getitem_3)""",
    )


def test_exported_graph_in_place():
    assert_expected_inline(
        graph_text(exported("rope_pool_fused_", strict=False).graph_module),
        """\
def forward(self, q, k, v, positions, slots, k_pool, v_pool):
    rope_pool_fused_ = torch.ops.ropepool.rope_pool_fused_.default(q, k, v, positions, slots, k_pool, v_pool, head_dim = 64, num_qo_heads = 4, num_kv_heads = 2, rope_base = 10000.0)
    return (None,)""",
    )


def test_decomposed_graph():
    """Functional: what mutates is the primitive, and only the pools."""
    program = exported("rope_pool_fused", strict=False).run_decompositions()
    assert_expected_inline(
        graph_text(program.graph_module),
        """\
def forward(self, q, k, v, positions, slots, k_pool, v_pool):
    auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.ropepool._rope_pool_fused.default, q = q, k = k, v = v, positions = positions, slots = slots, head_dim = 64, num_qo_heads = 4, num_kv_heads = 2, rope_base = 10000.0, inv_freq = None, attention_scaling = 1.0, rotary_dim = None, interleaved = False, page_size = None, mrope_section = None, mrope_interleaved = False, _k_pool_base_index = 0, _v_pool_base_index = 1, _all_bases = [k_pool, v_pool])
    getitem = auto_functionalized_v2[0]
    getitem_1 = auto_functionalized_v2[1]
    getitem_2 = auto_functionalized_v2[2]
    getitem_3 = auto_functionalized_v2[3]
    return (getitem_2, getitem_3, getitem, getitem_1, getitem_2, getitem_3)""",
    )
    assert_expected_inline(
        str(program.graph_signature.user_inputs_to_mutate),
        """{'getitem_2': 'k_pool', 'getitem_3': 'v_pool'}""",
    )


def test_make_fx_graph_in_place():
    call = make_sample()
    graph = make_fx(lambda *args: OPS["rope_pool_fused_"](*args, **call.kwargs))(*call.args)
    assert_expected_inline(
        graph_text(graph),
        """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1):
    rope_pool_fused_ = torch.ops.ropepool.rope_pool_fused_.default(arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1, head_dim = 64, num_qo_heads = 4, num_kv_heads = 2, rope_base = 10000.0)
    return None""",
    )


# ---- Results in graphs


@torch.no_grad()
def assert_compiles(function, call: Sample, **options) -> None:
    """The compiled function leaves the same bits in its arguments and gives the same results as eager."""
    compiled = torch.compile(function, fullgraph=True, **options)
    want, got = call.clone(), call.clone()
    for a, b in zip(compiled(*got.args), function(*want.args), strict=True):
        assert_same_bits(a, b)
    assert_equal_calls(got, want)


def symbolic_sizes(op: str):
    """The op with its sizes taken from the tensors, among other operations, and the pools read after it."""

    def function(q, k, v, positions, slots, k_pool, v_pool):
        q, k = q * 2, k + 1
        result = OPS[op](
            q,
            k,
            v,
            positions,
            slots,
            k_pool,
            v_pool,
            head_dim=q.shape[2],
            num_qo_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            rope_base=10000.0,
        )
        if result is not None:
            q, k = result[:2]
        return q + 0.5, k, k_pool[slots.long()] * 2, v_pool.amax()

    return function


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(op, backend, dynamic):
    assert_compiles(symbolic_sizes(op), make_sample(), backend=backend, dynamic=dynamic)


class Pools(torch.nn.Module):
    """The op on pools that are buffers."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = OPS[op]
        call = make_sample()
        self.register_buffer("k_pool", call.k_pool)
        self.register_buffer("v_pool", call.v_pool)

    def forward(self, q, k, v, positions, slots):
        q, k = q * 2, k + 1
        result = self.op(q, k, v, positions, slots, self.k_pool, self.v_pool, **KWARGS)
        if result is not None:
            q, k = result[:2]
        return q, k, self.k_pool[slots.long()]


def assert_same_buffers(got: torch.nn.Module, want: torch.nn.Module) -> None:
    buffers = dict(want.named_buffers())
    assert dict(got.named_buffers()).keys() == buffers.keys()
    for name, buffer in got.named_buffers():
        assert_same_bits(buffer, buffers[name])


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
@torch.inference_mode()
def test_pools_as_module_buffers(op, backend, dynamic):
    got, want = Pools(op), Pools(op)
    compiled = torch.compile(got, fullgraph=True, backend=backend, dynamic=dynamic)
    for num_tokens in (7, 1, 2, 0, 5) if dynamic else (7, 1, 0):
        inputs = make_sample(num_tokens, seed=num_tokens).args[:5]
        for a, b in zip(compiled(*inputs), want(*inputs), strict=True):
            assert_same_bits(a, b)
        assert_same_buffers(got, want)


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_place_on_views(dynamic, views, used, num_tokens):
    """q and k as views of arguments, which are then written, or as slices of a product; used later or dead."""

    def function(q, k, v, positions, slots, k_pool, v_pool):
        if views:
            q, k = q[3 : 3 + num_tokens], k[3 : 3 + num_tokens]
        else:
            q, k = (torch.cat([k, q], 1)[:num_tokens] * 2).split([2, 4], dim=1)[::-1]
        v, positions, slots = v[:num_tokens], positions[:num_tokens], slots[:num_tokens]
        OPS["rope_pool_fused_"](q, k, v, positions, slots, k_pool, v_pool, **KWARGS)
        return (q + 0.5, k * 2) if used else (k_pool.amax(),)

    assert_compiles(function, make_sample(12), dynamic=dynamic)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@torch.no_grad()
def test_token_counts_share_a_graph(op):
    compiled = torch.compile(symbolic_sizes(op), fullgraph=True, dynamic=True)
    for num_tokens in (5, 2, 7, 0, 1):
        call = make_sample(num_tokens)
        for name in ("q", "k", "v", "positions", "slots"):
            torch._dynamo.mark_dynamic(getattr(call, name), 0)
        want = call.clone()
        for a, b in zip(compiled(*call.args), symbolic_sizes(op)(*want.args), strict=True):
            assert_same_bits(a, b)
        assert_equal_calls(call, want)
    # Sizes 0 and 1 may have a graph each; all others share one.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("op", PUBLIC_OPS)
@torch.no_grad()
def test_unbacked_token_count(op):
    """The tokens that a mask picks: their number is known at run time only."""

    def function(mask, q, k, v, positions, slots, k_pool, v_pool):
        chosen = mask.nonzero()[:, 0]
        q, k, v, positions, slots = (t.index_select(0, chosen) for t in (q, k, v, positions, slots))
        return symbolic_sizes(op)(q, k, v, positions, slots, k_pool, v_pool)

    call = make_sample()
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True)
        want, got = call.clone(), call.clone()
        for a, b in zip(compiled(mask, *got.args), function(mask, *want.args), strict=True):
            assert_same_bits(a, b)
    assert_equal_calls(got, want)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_token_counts_that_differ_at_run_time(op, backend):
    """Two unbacked sizes: q's from one mask, the slots' from another."""

    def function(mask, other, q, k, v, positions, slots, k_pool, v_pool):
        chosen = mask.nonzero()[:, 0]
        q, k, v, positions = (t.index_select(0, chosen) for t in (q, k, v, positions))
        slots = slots.index_select(0, other.nonzero()[:, 0])
        return symbolic_sizes(op)(q, k, v, positions, slots, k_pool, v_pool)

    call = make_sample()
    mask, other = torch.tensor([[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0, 1]]).bool()
    want, got = call.clone(), call.clone()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        right = function(mask, other, *want.args)
        for a, b in zip(compiled(mask, other, *got.args), right, strict=True):
            assert_same_bits(a, b)
        assert_equal_calls(got, want)
        other[0] = True
        with pytest.raises((ValueError, RuntimeError), match=r"one entry per token|Eq\(u1, u0\)"):
            compiled(mask, other, *got.args)
        assert_equal_calls(got, want)


@torch.no_grad()
def test_cpu_and_cpu_0_are_one_device():
    def function(q, k, v, positions, slots, k_pool, v_pool):
        positions = torch.arange(7, device="cpu:0")
        return OPS["rope_pool_fused"](q, k, v, positions, slots, k_pool, v_pool, **KWARGS)[:2]

    assert_compiles(function, make_sample())


@torch.no_grad()
def test_error_in_a_compiled_function():
    call = make_sample().with_(num_qo_heads=2, num_kv_heads=4)
    compiled = torch.compile(module_of("rope_pool_fused", call.kwargs), fullgraph=True)
    with pytest.raises(RuntimeError, match="num_qo_heads and num_kv_heads look swapped"):
        compiled(*call.args)


@torch.no_grad()
def test_slot_out_of_range_in_a_compiled_function():
    call = make_sample()
    compiled = torch.compile(module_of("rope_pool_fused", call.kwargs), fullgraph=True)
    compiled(*call.clone().args)
    call.slots[2] = 32
    before = call.clone()
    with pytest.raises(IndexError, match=r"slots\[2\] is 32, out of range for pool_size 32"):
        compiled(*call.args)
    assert_equal_calls(call, before)


# ---- Export, make_fx and torch.fx


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("pools", ["buffers", "arguments"])
def test_saved_program(op, strict, decomposed, pools):
    """Saved and loaded: any number of tokens, and of pool rows where the pools are arguments."""
    num_tokens, pool_size = torch.export.Dim("num_tokens"), torch.export.Dim("pool_size")
    model, call = Pools(op), make_sample()
    inputs, dynamic = call.args[:5], ({0: num_tokens},) * 5
    if pools == "arguments":
        model = module_of(op, KWARGS)
        inputs, dynamic = call.args, (*dynamic, {0: pool_size}, {0: pool_size})
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=strict)
    if decomposed:
        program = program.run_decompositions()
    assert ("ropepool._rope_pool_fused" if decomposed else f"ropepool.{op}.default") in str(program.graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (7, 1, 2, 0, 9):
        got = make_sample(n, pool_size=32 if pools == "buffers" else 20 + n, seed=n)
        want = got.clone()
        results = loaded(*got.args[: len(inputs)]), model(*want.args[: len(inputs)])
        for a, b in zip(*(result or () for result in results), strict=True):
            assert_same_bits(a, b)
        assert_equal_calls(got, want)
        assert_same_buffers(loaded, model)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_views_have_a_constant_pool_size(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, positions, slots, buffer):
            pools = buffer[1, 0], buffer[1, 1]
            return OPS["rope_pool_fused"](q, k, v, positions, slots, *pools, **KWARGS)[:2]

    inputs = *make_sample().args[:5], torch.zeros(3, 2, 32, 2, 64)
    torch.export.export(Module(), inputs, strict=strict)
    dynamic = (None,) * 5 + ({2: torch.export.Dim("pool_size")},)
    with pytest.raises(torch._dynamo.exc.UserError, match=r"pool_size as dynamic .* a constant \(32\)"):
        torch.export.export(Module(), inputs, dynamic_shapes=dynamic, strict=strict)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(op, tracing_mode):
    function = symbolic_sizes(op) if tracing_mode == "symbolic" else module_of(op, KWARGS)
    graph = make_fx(function, tracing_mode=tracing_mode)(*make_sample().args)
    assert f"ropepool.{op}.default" in graph.code
    got = make_sample(9 if tracing_mode == "symbolic" else 7, seed=1)
    want = got.clone()
    for a, b in zip(graph(*got.args) or (), function(*want.args) or (), strict=True):
        assert_same_bits(a, b)
    assert_equal_calls(got, want)


@pytest.mark.parametrize("op", PUBLIC_OPS)
def test_symbolic_trace(op):
    graph = torch.fx.symbolic_trace(module_of(op, KWARGS))
    assert f"torch.ops.ropepool.{op}(" in graph.code
    got, want = make_sample(), make_sample()
    for a, b in zip(graph(*got.args) or (), OPS[op](*want.args, **KWARGS) or (), strict=True):
        assert_same_bits(a, b)
    assert_equal_calls(got, want)


# ---- What torch's compiler gets wrong, unless the op is careful (DESIGN: pytorch#198068, #198031)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("buffers", ["one", "two"])
@torch.no_grad()
def test_pools_as_views_of_a_layer(op, backend, buffers):
    """Layer 1 alone, so that a lost offset shows. With one buffer and with two, which do not overlap."""

    def function(q, k, v, positions, slots, k_buffer, v_buffer):
        k_pool, v_pool = (k_buffer[1, 0], k_buffer[1, 1]) if buffers == "one" else (k_buffer[1], v_buffer[1])
        return symbolic_sizes(op)(q, k, v, positions, slots, k_pool, v_pool)

    shape = (3, 2, 32, 2, 64) if buffers == "one" else (3, 32, 2, 64)
    generator = torch.Generator().manual_seed(1)
    call = make_sample().with_(
        k_pool=torch.randn(shape, generator=generator), v_pool=torch.randn(shape, generator=generator)
    )
    assert_compiles(function, call, backend=backend, dynamic=True)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_pools_passed_as_views_of_a_layer(op, backend, dynamic):
    """The views are made outside the graph. Before torch 2.13, Inductor writes their rows wrong: refused."""
    buffer = torch.randn(3, 2, 32, 2, 64, generator=torch.Generator().manual_seed(1))
    call = make_sample()
    want, got = buffer.clone(), buffer.clone()
    function = symbolic_sizes(op)
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    if TORCH < "2.13" and backend != "eager":
        with pytest.raises(
            RuntimeError, match="are two inputs of the graph, of which Inductor would copy one"
        ):
            compiled(*call.with_(k_pool=got[1, 0], v_pool=got[1, 1]).args)
        assert torch.equal(bits(got), bits(buffer))
        return
    a = compiled(*call.with_(k_pool=got[1, 0], v_pool=got[1, 1]).args)
    b = function(*call.with_(k_pool=want[1, 0], v_pool=want[1, 1]).args)
    for x, y in zip(a, b, strict=True):
        assert_same_bits(x, y)
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("op", PUBLIC_OPS)
@torch.no_grad()
def test_layers_passed_as_views_of_two_buffers(op):
    """A graph of two layers, whose pools are given as views of one buffer of keys and one of values."""

    def function(inputs, pools):
        return [symbolic_sizes(op)(*inputs, k_pool, v_pool) for k_pool, v_pool in pools]

    inputs = make_sample().args[:5]
    want, got = ([torch.ones(3, 32, 2, 64), torch.ones(3, 32, 2, 64)] for _ in range(2))
    results = [
        f(inputs, [(keys[layer], values[layer]) for layer in (2, 1)])
        for f, (keys, values) in ((function, want), (torch.compile(function, fullgraph=True), got))
    ]
    for a, b in zip(*(sum(layers, ()) for layers in results), strict=True):
        assert_same_bits(a, b)
    for a, b in zip(want, got, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_clones_of_views_as_q_and_k(op, dynamic, num_tokens):
    """A clone of a view with an offset, then mutated: torch would compute on the view's base."""

    def function(q, k, v, positions, slots, k_pool, v_pool):
        q, k = q[3 : 3 + num_tokens].clone(), k[3 : 3 + num_tokens].clone()
        v, positions, slots = v[:num_tokens], positions[:num_tokens], slots[:num_tokens]
        result = OPS[op](q, k, v, positions, slots, k_pool, v_pool, **KWARGS)
        return (q, k) if result is None else result[:2]

    assert_compiles(function, make_sample(12), dynamic=dynamic)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_gathered_pool_rows_as_k_and_v(op, dynamic):
    def function(q, k, v, positions, slots, k_pool, v_pool):
        k, v = (pool.index_select(0, torch.arange(4, 11)) for pool in (k_pool, v_pool))
        result = OPS[op](q, k, v, positions, slots, k_pool, v_pool, **KWARGS)
        return (q, k) if result is None else result[:2]

    assert_compiles(function, make_sample(), dynamic=dynamic)


@pytest.mark.parametrize("op", PUBLIC_OPS)
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_clones_of_pool_rows_as_k_and_v(op, dynamic):
    """Inductor drops such clones (pytorch#198031), so that k and v are what the op writes to: refused.

    A torch that keeps them will fail this test, and then the result must be the eager one.
    """

    def function(q, k, v, positions, slots, k_pool, v_pool):
        k, v = k_pool[4:11].clone(), v_pool[4:11].clone()
        result = OPS[op](q, k, v, positions, slots, k_pool, v_pool, **KWARGS)
        return (q, k) if result is None else result[:2]

    call = make_sample()
    before = call.clone()
    with pytest.raises((RuntimeError, ValueError), match="k_pool and k must not overlap"):
        torch.compile(function, fullgraph=True, dynamic=dynamic)(*call.args)
    assert_equal_calls(call, before)


def twice(op: str, between):
    """The same pool written twice in one graph, and what `between` reads of it in the middle."""

    def function(q, k, v, positions, slots, k_pool, v_pool):
        first, second = q.clone(), q + 1
        OPS[op](first, k.clone(), v, positions, slots, k_pool, v_pool, **KWARGS)
        middle = between(k_pool, slots)
        OPS[op](second, k * 2, -v, positions, slots.flip(0), k_pool, v_pool, **KWARGS)
        return first, second, middle

    return function


@pytest.mark.parametrize("op", PUBLIC_OPS)
def test_the_same_pool_twice_in_order(op):
    assert_compiles(twice(op, lambda k_pool, slots: k_pool[slots.long()] + 1), make_sample())


@torch.no_grad()
def test_torch_drops_a_clone_of_a_pool_between_two_writes():
    """A fault of Inductor's (of the kind of pytorch#198031), with any op that mutates: the clone becomes the
    pool itself. The pools are right. When this fails, torch has mended it: test it above, and say so.
    """
    function = twice("rope_pool_fused", lambda k_pool, slots: k_pool.clone())
    want, got = make_sample(), make_sample()
    *_, right = function(*want.args)
    *_, wrong = torch.compile(function, fullgraph=True)(*got.args)
    assert_equal_calls(got, want)
    assert not torch.equal(right, wrong)
    assert torch.equal(wrong, got.k_pool)


# Torch's auto_functionalized_v2 takes each of these for two buffers; it loses k's rows where v_pool's covers them.
TWO_BASES = {
    "k_pool detached": lambda buffer: (buffer[0].detach(), buffer[1]),
    "v_pool detached": lambda buffer: (buffer[0], buffer[1].detach()),
    "buffer detached twice": lambda buffer: (buffer.detach()[0], buffer.detach()[1]),
}


def pools_of(name: str):
    def function(q, k, v, positions, slots, buffer):
        result = OPS["rope_pool_fused"](q, k, v, positions, slots, *TWO_BASES[name](buffer), **KWARGS)
        return result[0].clone(), result[1].clone()

    return function


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pools", TWO_BASES)
def test_pools_of_one_buffer_through_two_bases(pools, backend, mode):
    """Refused wherever torch functionalizes."""
    call, buffer = make_sample(), torch.zeros(2, 32, 2, 64)
    want = buffer.clone()
    pools_of(pools)(*call.args[:5], want)
    with mode():
        compiled = torch.compile(pools_of(pools), fullgraph=True, backend=backend)
        if backend == "eager":
            compiled(*call.args[:5], buffer)
            assert_same_bits(buffer, want)
        else:
            with pytest.raises(RuntimeError, match="views of one buffer by way of different tensors"):
                compiled(*call.args[:5], buffer)
            assert not buffer.any()


def test_returned_pools_are_the_pools():
    def function(q, k, v, positions, slots, k_pool, v_pool):
        *_, k_new, v_new = OPS["rope_pool_fused"](q, k, v, positions, slots, k_pool, v_pool, **KWARGS)
        k_new.mul_(2)
        return k_new + v_new, k_pool.amax()

    assert_compiles(function, make_sample())
