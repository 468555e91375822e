"""The counter on programs whose cost is known by hand: compiled here, and as text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from depthjax.plan.hlo import Array, parse
from depthjax.plan.hlo_buffers import copies, largest_buffers
from depthjax.plan.hlo_collectives import collectives
from depthjax.plan.hlo_cost import count_flops, executions
from depthjax.plan.hlo_traffic import hbm_bytes, traffic_by_opcode

pytestmark = pytest.mark.jax_version

SIZE, TRIPS = 64, 5
SQUARE = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)


def program(function, *arguments, **options):
    return parse(jax.jit(function, **options).lower(*arguments).compile().as_text())


def scanned(x, w):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=TRIPS)[0]


def unrolled(x, w):
    for _ in range(TRIPS):
        x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize("function", [scanned, unrolled])
def test_a_loop_counts_as_often_as_it_runs(function):
    module = program(function, SQUARE, SQUARE)
    assert count_flops(module).matmul == TRIPS * 2 * SIZE**3
    assert executions(module)[1] == []


def test_nested_loops_multiply():
    def nested(x, w):
        return jax.lax.scan(lambda x, _: (scanned(x, w), None), x, length=3)[0]

    assert count_flops(program(nested, SQUARE, SQUARE)).matmul == 3 * TRIPS * 2 * SIZE**3


def test_the_gradient_of_a_product_is_two_products():
    def loss(x, w):
        return jnp.sum(scanned(x, w))

    module = program(jax.grad(loss, argnums=(0, 1)), SQUARE, SQUARE)
    assert count_flops(module).matmul == 3 * TRIPS * 2 * SIZE**3


def test_an_arm_counts_its_share():
    """Two of three arms do nothing; one of the three runs each time."""

    def chosen(i, x):
        return jax.lax.switch(i, [lambda x: x, lambda x: x @ x, lambda x: x], x)

    module = program(chosen, jax.ShapeDtypeStruct((), jnp.int32), SQUARE)
    assert count_flops(module).matmul == pytest.approx(2 * SIZE**3 / 3)


def test_batched_products_and_dot_products():
    batched = jax.ShapeDtypeStruct((3, SIZE, SIZE), jnp.float32)
    module = program(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), batched, batched)
    assert count_flops(module).matmul == 3 * 2 * SIZE**3
    vectors = count_flops(
        program(lambda a, b: jnp.einsum("bij,j->bi", a, b[0, 0]), batched, batched)
    )
    assert vectors.matmul == 0
    assert vectors.vector in (0, 3 * 2 * SIZE**2)  # 0 where it became a multiply and a reduction


# A TPU writes batched products as convolutions. Each is one product of known size.
CONVOLUTIONS = {
    "x w without any window": (
        "f32[512,1376] convolution(%a, %b), dim_labels=bf_io->bf",
        ("f32[512,512]", "f32[512,1376]"),
        512 * 512 * 1376,
    ),
    "x w for 16 heads of 76: the window slides over padding": (
        "bf16[2,2048,16,76] convolution(%a, %b), window={size=1x16 pad=0_0x15_15 rhs_reversal=0x1},"
        " dim_labels=0bf1_i1o0->0b1f",
        ("bf16[2,2048,1216,1]", "bf16[1216,16,76,1]"),
        2 * 2048 * 1216 * 16 * 76,
    ),
    "q k for each of 2 x 16 heads: the input is dilated": (
        "f32[2,16,2048,2048] convolution(%a, %b), window={size=2x16 stride=1x15 lhs_dilate=2x16},"
        " dim_labels=0b1f_0o1i->01bf",
        ("bf16[2,2048,16,76]", "bf16[2,2048,16,76]"),
        2 * 16 * 2048 * 2048 * 76,
    ),
    "a sum over the heads: the window is contracted": (
        "bf16[2,2048,1216,1] convolution(%a, %b), window={size=1x16}, dim_labels=0b1f_1io0->0bf1",
        ("bf16[2,2048,16,76]", "bf16[16,76,1216,1]"),
        2 * 2048 * 16 * 76 * 1216,
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_count_real_entries(name):
    text, operands, products = CONVOLUTIONS[name]
    lines = [
        f"  %{x} = {kind} parameter({i})"
        for i, (x, kind) in enumerate(zip("ab", operands, strict=True))
    ]
    module = parse(
        "\n".join(["ENTRY %main (a: f32[]) -> f32[] {", *lines, f"  ROOT %c = {text}", "}"])
    )
    assert count_flops(module).matmul == 2 * products


def test_text_that_goes_on_in_the_next_line():
    text = """HloModule m
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %k = f32[8] custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="a
} of
b"}, backend_config={"cost_estimate":{"flops":"70","bytes_accessed":"40"}}
  ROOT %t = (s32[], f32[8]) tuple(%i, %k)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  %c = s32[] constant(12)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i.1, %c), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %two = s32[] constant(2)
  %init = (s32[], f32[8]) tuple(%two, %a)
  %w = (s32[], f32[8]) while(%init), condition=%cond, body=%body
  ROOT %r = f32[8] get-tuple-element(%w), index=1
}
"""
    module = parse(text)
    assert count_flops(module).kernels == 10 * 70  # i = 2 .. 11
    assert hbm_bytes(module) == 10 * 40
    assert hbm_bytes(parse(text.replace(', backend_config={"cost', ', other={"'))) == 10 * 2 * 8 * 4
    gpu = text.replace('"cost_estimate":{"', 'cost_estimate_json = "{"').replace('40"}}', '40"}"}')
    gpu = gpu.replace(
        '{"flops":"70","bytes_accessed":"40"}', r"{\22flops\22: 70, \22bytes_accessed\22: 40}"
    )
    assert count_flops(parse(gpu)).kernels == 10 * 70
    assert hbm_bytes(parse(gpu)) == 10 * 40
    on_chip = text.replace("%x = f32[8] get", "%x = f32[8]{0:S(1)} get")
    assert hbm_bytes(parse(on_chip)) == 10 * (40 - 8 * 4)
    with pytest.raises(ValueError, match="ENTRY"):
        parse("nothing")


@pytest.mark.parametrize(
    ("name", "products"), [("splash_mha_fwd.1", 2), ("splash_mha_dkv.2", 4), ("splash_mha_dq", 3)]
)
def test_attention_kernels_do_half_the_square(name, products):
    """The forward has q k and p v; its backward again q k, and dv, dp, dk in one kernel, dp and dq
    in the other."""
    shape = "bf16[2,4,1024,128]"
    text = f"""ENTRY %main (a: f32[]) -> f32[] {{
  %i = s8[1,8,8] parameter(0)
  %q = {shape} parameter(1)
  ROOT %{name} = {shape} custom-call(%i, %q, %q, %q), custom_call_target="tpu_custom_call"
}}"""
    counted = count_flops(parse(text))
    assert counted.attention == products * 2 * (2 * 4 * 1024 * 1024 * 128) / 2
    assert counted.total == counted.attention
    assert counted.silent_kernels == ()


def test_bytes_of_arrays():
    """A tile of 8 x 128 is stored whole."""
    assert Array("bf16", (2, 2048, 76), "2,1,0:T(8,128)(2,1)").bytes == 2 * 2048 * 128 * 2
    assert Array("bf16", (2, 76, 2048), "1,2,0:T(8,128)(2,1)").bytes == 2 * 128 * 2048 * 2
    assert Array("f32", (3, 5), "1,0").bytes == 60
    assert Array("s4", (3,), "0").bytes == 2
    assert not Array("f32", (8,), "0:T(128)S(1)").in_hbm


def test_updates_in_place_count_what_they_touch():
    """A buffer of 100 rows of which a loop writes 5 and reads 5, and nothing else of it moves."""

    def fill(buffer, row):
        def step(buffer, i):
            old = jax.lax.dynamic_index_in_dim(buffer, i, 0, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(buffer, old + row, i, 0), None

        return jax.lax.scan(step, buffer, jnp.arange(TRIPS))[0]

    buffer = jax.ShapeDtypeStruct((100, 1024), jnp.float32)
    module = program(fill, buffer, jax.ShapeDtypeStruct((1024,), jnp.float32), donate_argnums=0)
    row = 4 * 1024
    assert TRIPS * 3 * row <= hbm_bytes(module) < 40 * row  # not TRIPS * 200


def test_fusions_within_fusions_hand_on_what_they_read():
    """A product whose operands pass through fusions of their own: one of which reinterprets its
    whole input, while the other takes a slice."""
    text = """HloModule m
%whole (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64] parameter(0)
  ROOT %b = f32[64,64] bitcast(%p)
}

%part (p: f32[8,64,64], i: s32[]) -> f32[64,64] {
  %p.1 = f32[8,64,64] parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,64,64] dynamic-slice(%p.1, %i, %i, %i), dynamic_slice_sizes={1,64,64}
  ROOT %b.1 = f32[64,64] bitcast(%s)
}

%product (x: f32[64,64], w: f32[8,64,64], i: s32[]) -> f32[64,64] {
  %x = f32[64,64] parameter(0)
  %w = f32[8,64,64] parameter(1)
  %i.1 = s32[] parameter(2)
  %fx = f32[64,64] fusion(%x), kind=kLoop, calls=%whole
  %fw = f32[64,64] fusion(%w, %i.1), kind=kLoop, calls=%part
  ROOT %d = f32[64,64] dot(%fx, %fw), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[64,64], w: f32[8,64,64], i: s32[]) -> f32[64,64] {
  %x.1 = f32[64,64] parameter(0)
  %w.1 = f32[8,64,64] parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %r = f32[64,64] fusion(%x.1, %w.1, %i.2), kind=kOutput, calls=%product
}
"""
    assert hbm_bytes(parse(text)) == 3 * 4 * 64 * 64 + 4
    assert count_flops(parse(text)).matmul == 2 * 64**3


def test_traffic_of_one_elementwise_pass():
    module = program(lambda x, y: jnp.tanh(x * y + 1), SQUARE, SQUARE)
    assert hbm_bytes(module) == pytest.approx(3 * 4 * SIZE**2, rel=0.01)
    assert sum(traffic_by_opcode(module).values()) == hbm_bytes(module)


def test_largest_buffers_and_copies():
    def outer(x):
        wide = jnp.outer(x, x)
        return jnp.sum(jnp.sort(wide, axis=0)), wide.T

    module = program(outer, jax.ShapeDtypeStruct((300,), jnp.float32))
    assert largest_buffers(module, 1)[0].bytes == 4 * 300**2
    text = """ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %small = f32[2]{0} copy(%a)
  ROOT %c = f32[4,8]{0,1} copy(%a), metadata={op_name="here"}
}"""
    assert [c.name for c in copies(parse(text))] == ["c", "small"]
    (found,) = copies(parse(text), at_least=100)
    assert (found.shape, found.dtype, found.times, found.origin) == ((4, 8), "f32", 1, "here")


@pytest.fixture(scope="module")
def mesh():
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=kinds)


def test_collectives_by_axis(mesh):
    """x [batch over data, D over tensor] times w: the contraction is summed over `tensor`; the
    gradient of w, once a scan step, over `data`."""
    rows = NamedSharding(mesh, P("data", "tensor"))
    columns = NamedSharding(mesh, P("tensor"))
    x = jax.ShapeDtypeStruct((8, SIZE), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((SIZE, 2 * SIZE), jnp.float32, sharding=columns)
    product = program(lambda x, w: x @ w, x, w, out_shardings=NamedSharding(mesh, P("data")))
    (found,) = collectives(product, dict(mesh.shape))
    assert (found.kind, found.axes, found.group, found.count) == ("all-reduce", "tensor", 2, 1)
    assert found.payload == found.sent == 8 // 4 * 2 * SIZE * 4  # 2 (n - 1) / n = 1

    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    module = program(gradient, x, w, out_shardings=columns)
    sums = {c.axes: c for c in collectives(module, dict(mesh.shape)) if c.kind == "all-reduce"}
    assert sums["data"].payload == SIZE // 2 * 2 * SIZE * 4
    assert sums["data"].sent == 1.5 * sums["data"].payload  # 2 (n - 1) / n of 4
    both = program(jnp.sum, x, out_shardings=NamedSharding(mesh, P()))
    over = {axis for c in collectives(both, dict(mesh.shape)) for axis in c.axes.split("+")}
    assert over == {"data", "tensor"}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", "data"),
        ("replica_groups=[1,8]<=[8]", "data+tensor"),
        ("replica_groups={}", "data+tensor"),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", "other"),
        ("replica_groups=mesh['data'=4,'tensor'=2] {'data'}", "data"),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", "tensor"),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(4)2}", "tensor"),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(1)4}", "data"),
    ],
)
def test_group_notations(groups, axes):
    text = f"""ENTRY %main (a: f32[4]) -> f32[4] {{
  %a = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%a), channel_id=1, {groups}, use_global_device_ids=true, to_apply=%s
}}"""
    (found,) = collectives(parse(text), {"data": 4, "tensor": 2})
    assert found.axes == axes


def test_permutes_follow_an_axis(mesh):
    def shift(x):
        return jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])

    moved = jax.shard_map(shift, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8, SIZE), np.float32, sharding=rows)
    found = collectives(program(moved, x), dict(mesh.shape))
    assert [(c.kind, c.axes, c.sent) for c in found] == [
        ("collective-permute", "data", 2 * SIZE * 4)
    ]


def test_what_crosses_slices_is_sent_by_the_host():
    """Two slices of two devices: 400 bytes summed within a slice, and then between them."""
    module = parse("""HloModule slices

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[100]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %y = f32[100]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %token = token[] after-all()
  %send = (f32[100]{0}, u32[], token[]) send(%y, %token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %z = f32[100]{0} copy(%y)
}
""")  # noqa: E501
    found = {c.axes: (c.kind, c.group, c.sent) for c in collectives(module, {"data": 4}, slices=2)}
    assert found == {
        "data": ("all-reduce", 2, 400.0),  # a ring of two sends all of it once
        "data, between slices": ("all-reduce", 2, 400.0),
    }
