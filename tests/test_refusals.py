"""What torch would do wrong with these ops is refused by name, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import assert_same_bits
from sample import OPS, TENSOR_NAMES, make_sample
from test_torch_modes import WAYS

import torch_ropepool

FLOATS = ("q", "k", "v", "k_pool", "v_pool")
each_op = pytest.mark.parametrize("op", OPS)

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda q: f(q)[0].sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@each_op
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func(op, transform):
    """Without this, gradients are zero, or those of an identity, without a word."""
    call = make_sample()
    before = call.clone()
    with pytest.raises(RuntimeError, match="it cannot be under a transform of"):
        TRANSFORMS[transform](lambda q: call.with_(q=q).run(op), call.q)
    for got, want in zip(call.tensors, before.tensors, strict=True):
        assert_same_bits(got, want)


@each_op
@pytest.mark.parametrize("name", FLOATS)
def test_lazily_negated_views(op, name):
    call = make_sample()
    before = call.clone()
    with pytest.raises(
        ValueError, match=rf"^{name} must not be a lazily negated view: pass {name}.resolve_neg\(\)$"
    ):
        call.with_(**{name: torch._neg_view(getattr(call, name))}).run(op)
    for got, want in zip(call.tensors, before.tensors, strict=True):
        assert_same_bits(got, want)


@each_op
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", TENSOR_NAMES)
def test_none(op, name, device):
    args = {n: getattr(make_sample(), n).to(device) for n in TENSOR_NAMES} | {name: None}
    with pytest.raises(ValueError, match=f"^{name} must be a tensor, got None$"):
        OPS[op](**args, **make_sample().kwargs)


@pytest.mark.parametrize("op", ["rope_pool_fused", "rope_pool_fused_"])
@pytest.mark.parametrize("name", ["q", "v", "k_pool"])
def test_layouts(op, name):
    """The primitive has torch's own error for them."""
    call = make_sample()
    tensor = getattr(call, name)
    for layout, other in {"sparse_coo": tensor.to_sparse(), "_mkldnn": tensor.to_mkldnn()}.items():
        with pytest.raises(ValueError, match=f"^{name} must be a dense strided tensor, got layout {layout}$"):
            call.with_(**{name: other}).run(op)


ODD = {
    "sparse": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
    "jagged": lambda t: torch.nested.nested_tensor([t[0], t[1]], layout=torch.jagged),
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "negated": torch._neg_view,
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
}
# Of some torch says itself that it cannot trace them.
OWN_TEXTS = {
    "conjugate": "q/k/v dtypes must match, got q complex64",
    "negated": "q must not be a lazily negated view: pass q.resolve_neg()",
    "complex": "q/k/v dtypes must match, got q complex64",
    "bool": "q/k/v dtypes must match, got q bool",
}


@each_op
@pytest.mark.parametrize("kind", ODD)
@torch.no_grad()
def test_odd_tensors(kind, op):
    """In eager calls the ops say it; the primitive leaves layouts to torch."""
    call = make_sample()
    before = call.clone()
    with pytest.raises((ValueError, NotImplementedError)) as error:
        call.with_(q=ODD[kind](call.q)).run(op)
    assert isinstance(error.value, ValueError) or op == "_rope_pool_fused"
    for got, want in zip(call.tensors, before.tensors, strict=True):
        assert_same_bits(got, want)


@each_op
@pytest.mark.parametrize("way", ["compile", "export"])
@pytest.mark.parametrize("kind", ODD)
@torch.no_grad()
def test_odd_tensors_in_graphs(kind, way, op):
    call = make_sample()
    before = call.clone()
    odd = call.with_(q=ODD[kind](call.q))
    with pytest.raises(Exception) as error:
        WAYS[way](op, odd)
    assert OWN_TEXTS.get(kind, "") in str(error.value)
    for got, want in zip(call.tensors, before.tensors, strict=True):
        assert_same_bits(got, want)


WRONG_MEMORY = {
    "k_pool must not overlap itself": lambda call: {"k_pool": call.k_pool[:1].expand(32, 2, 64)},
    "k_pool and v_pool must not overlap": lambda call: {"v_pool": call.k_pool},
    "k_pool and v must not overlap": lambda call: {"v": call.k_pool[3:10]},
    "all tensors must be on one device": lambda call: {"v": call.v.to("meta")},
    "exactly one of rope_base and inv_freq must be given, got both": lambda call: {
        "inv_freq": torch.ones(32)
    },
}


@each_op
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", WRONG_MEMORY)
@torch.no_grad()
def test_memory_that_is_shared_or_elsewhere(text, way, op):
    call = make_sample()
    before = call.clone()
    broken = call.with_(**WRONG_MEMORY[text](call))
    with pytest.raises((ValueError, RuntimeError), match=text):
        WAYS[way](op, broken)
    for got, want in zip(call.tensors, before.tensors, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_in_a_compiled_function(transform):
    call = make_sample()
    before = call.clone()
    function = torch.compile(
        lambda x: TRANSFORMS[transform](lambda q: call.with_(q=q).run(), x), backend="aot_eager"
    )
    with pytest.raises(RuntimeError, match=r"under a transform of torch\.func"):
        function(call.q)
    for got, want in zip(call.tensors, before.tensors, strict=True):
        assert_same_bits(got, want)


def test_outputs_that_cannot_be_allocated():
    """2^32 tokens that take no memory, whose outputs would take 4 TiB."""
    call = make_sample(1)
    many = {n: getattr(call, n).expand(2**32, *getattr(call, n).shape[1:]) for n in TENSOR_NAMES[:5]}
    pools = call.k_pool.clone(), call.v_pool.clone()
    with pytest.raises(RuntimeError, match="could not allocate an output of q's size"):
        call.with_(**many).run()
    assert torch.equal(call.k_pool, pools[0]) and torch.equal(call.v_pool, pools[1])


def test_messages_have_no_path_of_the_build_machine():
    library = torch_ropepool.library_path().read_bytes()
    assert b"torch_ropepool/csrc/" in library  # torch's checks name the source file
    assert str(Path(__file__).parent.parent).encode() not in library
