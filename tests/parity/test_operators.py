"""Equality of single operators with public reference code, in fp32, bf16 and fp64 (README.md here).

The references are float64 results on the same inputs. "Within x" means: of the largest value of the
reference tensor.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from safetensors.numpy import load_file

from depthjax.kernels import depth_mix, depth_weights, phase1, phase2
from depthjax.residuals import HC, BlockAttnRes, FullAttnRes, MHCNative, append, mhc
from depthjax.residuals.mhc import sinkhorn

pytestmark = pytest.mark.jax_version

FOLDER = pathlib.Path(__file__).parent / "ops"
FIXTURES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))

# What a precision is held to.
BFLOAT16, FLOAT32, FLOAT64 = (jnp.bfloat16, 1e-2), (jnp.float32, 1e-5), (jnp.float64, 1e-9)
in_both_precisions = pytest.mark.parametrize(
    "precision", [FLOAT32, FLOAT64], ids=["float32", "float64"]
)


def cases(*prefixes):
    names = [name for name in FIXTURES if name.startswith(prefixes)]
    return pytest.mark.parametrize("case", names)


@functools.cache
def load(case):
    """(tensors, args) of a fixture."""
    args = json.loads((FOLDER / f"{case}.json").read_text())["args"]
    return load_file(FOLDER / f"{case}.safetensors"), args


def inputs(tensors, dtype):
    """All inputs and parameters by name, without their prefix, in the given dtype."""
    return {
        name.partition(".")[2]: jnp.asarray(value, dtype)
        for name, value in tensors.items()
        if name.startswith(("in.", "param."))
    }


def value_and_gradients(function, given):
    """Runs `function(given)`, which returns {name: output} with the one that meets the cotangent
    first; also the gradients of sum(output * cot) with respect to everything given."""

    def loss(given):
        outputs = function(given)
        first = next(iter(outputs.values()))
        wide = jnp.promote_types(first.dtype, jnp.float32)
        return jnp.sum(first.astype(wide) * given["cot"].astype(wide)), outputs

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(given)
    return outputs, gradients


def assert_within(bound, actual, reference, name, scale=None):
    """Every entry within `bound` of the largest of the reference, or of `scale`."""
    scale = np.max(np.abs(reference)) if scale is None else scale
    error = np.max(np.abs(np.asarray(actual, np.float64) - reference))
    assert error <= bound * scale, f"{name}: off by {error / (scale or 1)} of {scale}"


def compare(tensors, outputs, gradients, bound):
    """Everything that the fixture holds is compared."""
    produced = {f"out.{name}": value for name, value in outputs.items()}
    produced |= {f"grad.{name}": value for name, value in gradients.items()}
    wanted = [name for name in tensors if name.startswith(("out.", "grad."))]
    assert wanted
    for name in wanted:
        assert_within(bound, produced[name], tensors[name], name)


def test_all_fixtures_are_here():
    counts = {"attnres_mix": 13, "attnres_stack": 6, "attnres_k3": 1, "hc": 2, "sinkhorn": 3}
    counts |= {"mhc_0": 2, "mhc_lite": 2, "attnres_two_phase": 3}
    for prefix, count in counts.items():
        assert sum(name.startswith(prefix) for name in FIXTURES) == count
    assert len(FIXTURES) == sum(counts.values())


# Softmax attention over depth


forms = pytest.mark.parametrize(
    "form", ["xla", pytest.param("mosaic_tpu", marks=pytest.mark.proof)]
)
"""By default without kernels: interpreted they take a while on every fixture."""


@pytest.fixture(autouse=True)
def simulated_tpu():
    """Kernels run as JAX simulates a TPU: as plain JAX, what a compiler leaves out of its
    optimisations shows at logits of hundreds."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield


def mix(case, dtype, form=None):
    """(outputs, gradients) of `depth_mix` and `depth_weights` on a fixture's inputs."""
    tensors, args = load(case)

    def run(given):
        sources, key_scale = given["residuals"], given["rms_weight"]
        query, eps = given["query"] * args["scale"], args["rms_eps"]
        options = {"output_scale": given.get("output_rms_weight"), "implementation": form}
        mixture = depth_mix(sources, query, key_scale, eps=eps, **options)
        return {"o": mixture, "p": depth_weights(sources, query, key_scale, eps=eps)}

    outputs, gradients = value_and_gradients(run, inputs(tensors, dtype))
    for a, b in args["shared_sources"] or []:  # two sources that are one tensor
        both = gradients["residuals"][a] + gradients["residuals"][b]
        gradients["residuals"] = gradients["residuals"].at[jnp.array([a, b])].set(both)
    return outputs, gradients


def compare_mix(case, outputs, gradients, bound):
    tensors, args = load(case)
    if args["query_scale"] == 40:  # saturated: what reaches the query is cancellation alone
        scale = np.max(np.abs(tensors["grad.residuals"]))
        for name in ("query", "rms_weight"):
            assert_within(bound, gradients[name], tensors[f"grad.{name}"], name, scale)
        tensors = {k: v for k, v in tensors.items() if k not in ("grad.query", "grad.rms_weight")}
    compare(tensors, outputs, gradients, bound)


def largest_logit(case):
    tensors, args = load(case)
    sources = np.asarray(tensors["in.residuals"], np.float64)
    direction = np.asarray(tensors["in.query"] * tensors["in.rms_weight"], np.float64)
    norms = np.sqrt(np.mean(sources**2, -1) + args["rms_eps"])
    return np.max(np.abs(sources @ direction / norms)) * args["scale"]


@forms
@cases("attnres_mix")
def test_depth_mix(case, form):
    """A logit is exact to one rounding of itself, and so are the weights: at logits of 300 this is
    more than 1e-5, and the reference's own fp32 result is off by as much."""
    dtype, bound = {"float32": FLOAT32, "bfloat16": BFLOAT16}[load(case)[1]["dtype"]]
    bound = max(bound, np.finfo(np.float32).eps * largest_logit(case))
    outputs, gradients = mix(case, dtype, form)
    assert outputs["o"].dtype == dtype
    compare_mix(case, outputs, gradients, bound)


@cases("attnres_mix")
def test_depth_mix_in_float64(case):
    with jax.enable_x64(True):
        outputs, gradients = mix(case, jnp.float64)
        compare_mix(case, outputs, gradients, 1e-9)


# Attention Residuals over a whole stack


def run_stack(rule, embedding, readers, branch):
    """The moves of a rule over any number of sublayers, one a reader: (carry, history, seen), the
    last with lists by sublayer."""
    carry, history = rule.begin(embedding, layers=-(-len(readers) // 2))
    seen = {"inputs": [], "outputs": [], "weights": [], "open": [], "finished": []}
    for s, reader in enumerate(readers):
        weights = rule.observe(reader, carry, history, s)["weights"]
        x, _, carry, history = rule.read(reader, carry, history, s)
        y = branch(x, s)
        carry, appended = rule.write(reader, carry, y, None, s)
        history = append(history, appended)
        for name, value in zip(seen, (x, y, weights, carry["open"], carry["count"]), strict=True):
            seen[name].append(value)
    return carry, history, seen


def apply(matrix, x):
    """A Linear weight [out, in] on [..., in]."""
    return jnp.einsum("...i,oi->...o", x, matrix, precision="highest")


def compare_weights(ours, reference, bound, name):
    """ours: the history's rows, then the open sum; reference: the live sources alone, in order."""
    finished = len(reference) - 1
    assert not np.any(ours[finished:-1])
    assert_within(bound, np.delete(ours, np.s_[finished:-1], axis=0), reference, name)


@in_both_precisions
@cases("attnres_stack")
def test_attnres_stack(case, precision):
    """Also odd numbers of sublayers, and a block size beyond their number."""
    tensors, args = load(case)
    dtype, bound = precision
    sublayers, eps = args["num_sublayers"], args["eps"]
    rule = FullAttnRes(eps=eps, mix_eps=eps)
    if args["variant"] == "block":
        rule = BlockAttnRes(block_size_sublayers=args["block_size_sublayers"], eps=eps, mix_eps=eps)

    def run(given):
        names = {"queries": "query", "key_norm_weight": "key_scale", "pre_gamma": "norm"}
        rows = {ours: given[theirs] for theirs, ours in names.items()}
        rows["norm"] = jnp.concatenate([rows["norm"], jnp.ones_like(rows["norm"][:1])])
        *readers, last = ({k: v[s] for k, v in rows.items()} for s in range(sublayers + 1))

        def branch(x, s):
            return apply(given["W2"][s], jnp.tanh(apply(given["W1"][s], x)))

        carry, history, seen = run_stack(rule, given["embedding"], readers, branch)
        # The fixture's final mixture has no norm behind it, so it is taken from the state directly.
        newest = {"count": carry["count"], "newest": carry["open"], "eps": eps}
        return {
            "final": depth_mix(history, last["query"], last["key_scale"], **newest),
            "normed_final": rule.finish(last, carry, history),
            "normed_inputs": jnp.stack(seen["inputs"]),
            "layer_outputs": jnp.stack(seen["outputs"]),
            "weights": [*seen["weights"], rule.observe(last, carry, history, None)["weights"]],
        }

    with jax.enable_x64(dtype == jnp.float64):
        outputs, gradients = value_and_gradients(run, inputs(tensors, dtype))
    rest = dict(tensors)
    counts, weights = rest.pop("out.num_sources"), rest.pop("out.alpha_padded")
    for reader, (count, ours) in enumerate(zip(counts, outputs["weights"], strict=True)):
        compare_weights(np.asarray(ours), weights[reader, :count], bound, f"reader {reader}")
    gamma = tensors["in.pre_gamma"][:, None, None]
    rest["out.normed_inputs"] = normed(rest.pop("out.layer_inputs"), eps) * gamma
    rest["out.normed_final"] = normed(rest["out.final"], eps)
    compare(rest, outputs, gradients, bound)


def normed(x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


@cases("attnres_k3")
def test_kimi_k3_stack(case):
    """Block sizes in transformer layers; the first layer's attention mixes nothing."""
    tensors, args = load(case)
    eps = {"eps": args["eps"], "mix_eps": args["eps"]}
    rule = BlockAttnRes.of_layers(args["block_size_layers"], **eps).bind(args["num_layers"])
    sublayers = [(kind, i) for i in range(args["num_layers"]) for kind in ("attn", "ffn")]
    names = {"query": "res_proj", "key_scale": "res_norm", "norm": "norm"}

    def run(given):
        readers = [
            {ours: given[f"{kind}_{theirs}"][i] for ours, theirs in names.items()}
            for kind, i in sublayers
        ]

        def branch(x, s):
            kind, i = sublayers[s]
            return {"attn": jnp.tanh, "ffn": jnp.sin}[kind](apply(given[f"{kind}_W"][i], x))

        carry, history, seen = run_stack(rule, given["embedding"], readers, branch)
        last = {"query": given["output_res_proj"], "key_scale": given["output_res_norm"]}
        return {
            "final": rule.finish({**last, "norm": given["final_norm"]}, carry, history),
            "prefix_sum_after_layer": jnp.stack(seen["open"][1::2]),
            "num_completed_blocks": jnp.stack(seen["finished"][1::2]),
            "block_residual": jnp.moveaxis(history, 0, -2),
        }

    with jax.enable_x64(True):
        outputs, gradients = value_and_gradients(run, inputs(tensors, jnp.float64))
        compare(tensors, outputs, gradients, 1e-9)


# Attention Residuals in two phases


def merged(mixture, lse, open_sum, query, eps, form=None):
    """The input of a sublayer, before its norm: the RMS of the result is taken out of phase 2."""
    merge = {"query": query, "norm_scale": jnp.ones_like(query), "eps": eps}
    merge["implementation"] = form
    x, _ = phase2(mixture, lse, open_sum, norm_eps=0.0, **merge)
    rms = jnp.sqrt(jnp.mean(open_sum**2, -1) + eps)
    logit = jnp.sum(open_sum * query, -1) / rms
    w = jax.nn.sigmoid(logit - lse)[..., None]
    h = mixture + w * (open_sum - mixture)
    return x * jnp.sqrt(jnp.mean(h * h, -1, keepdims=True))


@forms
@cases("attnres_two_phase_0")
def test_two_phases(case, form):
    """Stored in fp32, as the reference computes."""
    tensors, args = load(case)
    given = inputs(tensors, jnp.float32)
    eps, options = args["eps"], {"implementation": form}
    mixtures, lse = phase1(given["block_values"], given["queries"], eps=eps, **options)
    rest = zip(mixtures[1:], lse[1:], given["partial_sums"], given["queries"][1:], strict=True)
    outputs = {"first_layer_input": mixtures[0], "lse": lse, "phase1_normalized": mixtures}
    outputs["merged"] = jnp.stack([merged(*each, eps, form) for each in rest])
    wanted = {name: value for name, value in tensors.items() if name.startswith("out.")}
    compare(wanted, outputs, {}, 2e-5)


@cases("attnres_two_phase_model")
def test_a_model_in_two_phases(case):
    """Sublayers without a norm in front, tanh(W h); the final mixture reads the last open sum."""
    tensors, args = load(case)
    size, eps = args["block_size_sublayers"], args["eps"]

    def run(given):
        blocks, queries, open_sum = given["embedding"][None], given["queries"], None
        for s in range(args["L"] + 1):
            if s % size == 0 and s < args["L"]:
                if open_sum is not None:
                    blocks, open_sum = jnp.concatenate([blocks, open_sum[None]]), None
                mixtures, lse = phase1(blocks, queries[s : s + size], eps=eps)
            elif s == args["L"]:
                mixtures, lse = phase1(blocks, queries[s:], eps=eps)
            k = s % size
            h = mixtures[k]
            if open_sum is not None:
                h = merged(h, lse[k], open_sum, queries[s], eps)
            if s < args["L"]:
                y = jnp.tanh(apply(given["W"][s], h))
                open_sum = y if open_sum is None else open_sum + y
        return {"two_phase": h, "naive": h}

    with jax.enable_x64(True):
        outputs, gradients = value_and_gradients(run, inputs(tensors, jnp.float64))
    for name in ("embedding", "queries"):
        gradients |= {f"{name}.{form}": gradients[name] for form in ("naive", "two_phase")}
    compare(tensors, outputs, gradients, 1e-5)


# Hyper-Connections and their relatives

# Their norms have no epsilon. Ours do not see the scale of the streams except for theirs, which
# this makes negligible.
LARGE = 1e4


def weights_of(rule, params, streams):
    """With the axes of the fixtures: (read [..., m], write [..., m], transport [..., m, m])."""
    read, write, transport = rule.weights(params, LARGE * jnp.moveaxis(streams, -2, 0))
    read, write = jnp.moveaxis(read, 0, -1), jnp.moveaxis(write, 0, -1)
    return read, write, jnp.moveaxis(transport, (0, 1), (-2, -1))


def hc_weights(args, given, streams):
    scale = 1 + given["norm.gamma"]
    params = {
        "static_alpha": given["static_alpha"],
        "dynamic_alpha_proj": given["dynamic_alpha_fn"] * scale[:, None],
        "dynamic_alpha_scale": given["dynamic_alpha_scale"],
        "static_beta": given["static_beta"],
        "dynamic_beta_proj": given["dynamic_beta_fn"] * scale,
        "dynamic_beta_scale": given["dynamic_beta_scale"],
    }
    return weights_of(HC(streams=args["n"]), params, streams)


def split_columns(args, given):
    """(read, residual) of the fixtures' static and dynamic parts: of mHC's [m, 1 + m], of
    mHC-lite's m + m!."""
    scale, m = (1 + given["norm.gamma"])[:, None], args["n"]
    static, dynamic = given["static_alpha"], given["dynamic_alpha_fn"] * scale
    if static.ndim == 1:
        return (static[:m], static[m:]), (dynamic[:, :m], dynamic[:, m:])
    dynamic = dynamic.reshape(-1, m, m + 1)
    return (static[:, 0], static[:, 1:]), (dynamic[..., 0], dynamic[..., 1:])


def mhc_weights(args, given, streams):
    """Their residual logits are [source, target], and sources are normalised first."""
    m, scale = args["n"], (1 + given["norm.gamma"])[:, None]
    (read, residual), (read_proj, residual_proj) = split_columns(args, given)
    params = {
        "pre_bias": read,
        "pre_dynamic_proj": read_proj,
        "pre_gate": given["pre_branch_scale"][0],
        "post_bias": given["static_beta"],
        "post_dynamic_proj": given["dynamic_beta_fn"] * scale,
        "post_gate": given["h_post_scale"],
        "residual_bias": residual.T,
        "residual_dynamic_proj": jnp.swapaxes(residual_proj, 1, 2).reshape(-1, m * m),
        "residual_gate": given["residual_scale"][0],
    }
    rule = MHCNative(streams=m, sinkhorn_rounds=args["sinkhorn_iters"])
    read, write, transport = weights_of(rule, params, streams)
    return read, write, jnp.swapaxes(transport, -1, -2)


def mhc_lite_weights(args, given, streams):
    """The gates as in mHC; the transport is a mixture of permutations [source, target]."""
    (read, residual), (read_proj, residual_proj) = split_columns(args, given)
    z = streams.reshape(*streams.shape[:-2], -1)
    z /= jnp.sqrt(jnp.mean(z * z, -1, keepdims=True))
    write_proj = given["dynamic_beta_fn"] * (1 + given["norm.gamma"])[:, None]
    read = jax.nn.sigmoid(given["pre_branch_scale"] * (z @ read_proj) + read)
    write = 2 * jax.nn.sigmoid(given["h_post_scale"] * (z @ write_proj) + given["static_beta"])
    logits = given["residual_scale"] * (z @ residual_proj) + residual
    transport = mhc.permutation_mixture(jnp.moveaxis(logits, -1, 0), args["n"])
    return read, write, jnp.moveaxis(transport, (1, 0), (-2, -1))


WEIGHTS = {"hc": hc_weights, "mhc": mhc_weights, "mhc_lite": mhc_lite_weights}


@in_both_precisions
@cases("hc_", "mhc_")
def test_streams(case, precision):
    """Two connectors with tanh branches between: reads, writes, transports and all gradients. Those
    of a scalar gain are sums that cancel, so fp32 is held to a little less."""
    tensors, args = load(case)
    dtype, bound = precision if precision == FLOAT64 else (jnp.float32, 5e-5)
    weights = WEIGHTS[case[: case.index("_0")]]

    def run(given):
        streams, outputs = given["streams"], {}
        for layer in range(args["layers"]):
            prefix = f"layer{layer}."
            own = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
            read, write, transport = weights(args, own, streams)
            x = jnp.einsum("...m,...md->...d", read, streams, precision="highest")
            mixed = jnp.einsum("...tm,...md->...td", transport, streams, precision="highest")
            y = jnp.tanh(apply(given[f"W{layer}"], x))
            streams = mixed + write[..., None] * y[..., None, :]
            values = {"branch_input": x, "res_streams": mixed, "beta": write, "streams": streams}
            outputs |= {f"{name}{layer}": value for name, value in values.items()}
        return dict(reversed(outputs.items()))  # the last streams meet the cotangent

    with jax.enable_x64(dtype == jnp.float64):
        outputs, gradients = value_and_gradients(run, inputs(tensors, dtype))
    compare(tensors, outputs, gradients, bound)


@in_both_precisions
@cases("sinkhorn")
def test_sinkhorn(case, precision):
    tensors, args = load(case)
    dtype, bound = precision

    def run(given):
        matrix = sinkhorn(jnp.moveaxis(given["logits"], (-2, -1), (0, 1)), args["iters"], delta=0.0)
        return {"H": jnp.moveaxis(matrix, (0, 1), (-2, -1))}

    with jax.enable_x64(dtype == jnp.float64):
        outputs, gradients = value_and_gradients(run, inputs(tensors, dtype))
    compare(tensors, outputs, gradients, bound)
