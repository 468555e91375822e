"""Every residual connection once more, as the papers print it: Python lists, no state, no masks.

Each function takes (rule, layered parameters, branches, embedding [..., D]) and returns what the LM
head reads. `branches[s]` maps the input of sublayer s to its output; its `layer` is the module.
"""

import itertools
import math

import jax.numpy as jnp

from depthjax.layers.rope import rope


def norm(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def row(params, s):
    return {name: value[s // 2] for name, value in params[("attention", "mlp")[s % 2]].items()}


def pre_ln(rule, params, branches, x):
    for s, branch in enumerate(branches):
        x = x + branch(norm(x, row(params, s)["norm"], rule.eps))
    return norm(x, params["final"]["norm"], rule.eps)


def post_ln(rule, params, branches, x):
    for s, branch in enumerate(branches):
        x = norm(x + branch(x), row(params, s)["norm"], rule.eps)
    return norm(x, params["final"]["norm"], rule.eps)


def scaled_pre_ln(exponent):
    """DepthBench's code."""

    def run(rule, params, branches, x):
        scale = (len(branches) / 2 / rule.base_layers) ** -exponent
        for s, branch in enumerate(branches):
            x = x + scale * branch(norm(x, row(params, s)["norm"], rule.eps))
        width = x.shape[-1]
        return norm(x, params["final"]["norm"], rule.eps) * (rule.base_width or width) / width

    return run


def sandwich_ln(rule, params, branches, x):
    for s, branch in enumerate(branches):
        p = row(params, s)
        x = x + norm(branch(norm(x, p["norm"], rule.eps)), p["post_norm"], rule.eps)
    return norm(x, params["final"]["norm"], rule.eps)


def lns(rule, params, branches, x):
    layers = len(branches) // 2
    for s, branch in enumerate(branches):
        scale = (layers if rule.constant else s // 2 + 1) ** -0.5
        x = x + branch(scale * norm(x, row(params, s)["norm"], rule.eps))
    return norm(x, params["final"]["norm"], rule.eps)


def deepnorm(rule, params, branches, x):
    for s, branch in enumerate(branches):
        x = len(branches) ** 0.25 * x + branch(x)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        x = norm(centred, row(params, s)["norm"], rule.eps)
    return norm(x, params["final"]["norm"], rule.eps)


def keel(rule, params, branches, x):
    for s, branch in enumerate(branches):
        p = row(params, s)
        y = branch(norm(x, p["norm"], rule.eps))
        x = (x if s < 2 else len(branches) * x) + y
        x = norm(x, p["post_norm"], rule.eps) if s else x
    return norm(x, params["final"]["norm"], rule.eps)


def hyper(connector, collapse):
    """Streams as a list: each sublayer reads, transports and writes with weights of `connector`."""

    def run(rule, params, branches, x):
        m = rule.streams
        streams = [x] * m
        for s, branch in enumerate(branches):
            p = row(params, s)
            read, write, transport = connector(rule, p, streams)
            u = sum(read[..., j, None] * streams[j] for j in range(m))
            y = branch(norm(u, p["norm"], rule.eps))
            streams = [
                sum(transport[..., t, j, None] * streams[j] for j in range(m))
                + write[..., t, None] * y
                for t in range(m)
            ]
        return norm(collapse(sum(streams), m), params["final"]["norm"], rule.eps)

    return run


def hc_weights(rule, p, streams):
    """Row j of alpha and beta from stream j alone (DepthBench, appendix A)."""
    alpha, beta = [], []
    for j, stream in enumerate(streams):
        n = norm(stream, 1.0, 1e-8)
        gates = jnp.tanh(n @ p["dynamic_alpha_proj"]) * p["dynamic_alpha_scale"]
        alpha.append(gates + p["static_alpha"][j])
        gate = jnp.tanh(n @ p["dynamic_beta_proj"]) * p["dynamic_beta_scale"]
        beta.append(gate + p["static_beta"][j])
    alpha = jnp.stack(alpha, axis=-2)  # [..., j, t]
    return alpha[..., 0], jnp.stack(beta, axis=-1), jnp.swapaxes(alpha[..., 1:], -1, -2)


def balance(matrix, rounds, delta=0.0):
    """Alternating row and column normalisation, in a plain loop."""
    for _ in range(rounds):
        matrix = matrix / (matrix.sum(-1, keepdims=True) + delta)
        matrix = matrix / (matrix.sum(-2, keepdims=True) + delta)
    return matrix


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


def mhc_weights(rule, p, streams):
    """DepthBench, appendix A."""
    m = rule.streams
    mix = norm(jnp.concatenate(streams, axis=-1), 1.0, rule.stream_eps) @ p["phi"]
    read = sigmoid(p["alpha_pre"] * mix[..., :m] + p["b"][:m])
    write = 2 * sigmoid(p["alpha_post"] * mix[..., m : 2 * m] + p["b"][m : 2 * m])
    z = (p["alpha_res"] * mix[..., 2 * m :] + p["b"][2 * m :]).reshape(*mix.shape[:-1], m, m)
    delta = rule.sinkhorn_delta
    matrix = jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True) + delta
    matrix = matrix / (matrix.sum(-2, keepdims=True) + delta)
    return read, write, balance(matrix, rule.sinkhorn_rounds - 1, delta)


def projected(transport):
    """DepthBench's code; M[s, t] carries stream s to new stream t."""

    def weights(rule, p, streams):
        z = norm(jnp.concatenate(streams, axis=-1), 1.0, 1e-8)
        read = sigmoid(p["pre_gate"] * (z @ p["pre_dynamic_proj"]) + p["pre_bias"])
        write = 2 * sigmoid(p["post_gate"] * (z @ p["post_dynamic_proj"]) + p["post_bias"])
        logits = p["residual_gate"] * (z @ p["residual_dynamic_proj"])
        logits = logits.reshape(*logits.shape[:-1], *p["residual_bias"].shape)
        matrix = transport(rule, jnp.exp(logits + p["residual_bias"]))
        return read, write, jnp.swapaxes(matrix, -1, -2)

    return weights


def balanced(rule, matrix):
    return balance(matrix, rule.sinkhorn_rounds)


def mixed_permutations(rule, weights):
    """mHC-lite: the convex combination of all permutation matrices."""
    total, m = weights.sum(-1, keepdims=True), rule.streams
    matrices = [jnp.eye(m)[:, list(p)].T for p in itertools.permutations(range(m))]
    return sum((weights / total)[..., i, None, None] * p for i, p in enumerate(matrices))


def mhc_static_weights(rule, p, streams):
    read, write = (jnp.exp(p[f"H_{n}_logits"]) for n in ("pre", "post"))
    transport = balance(jnp.exp(p["H_res_logits"] / rule.sinkhorn_tau), rule.sinkhorn_rounds)
    return read / read.sum(), write / write.sum(), transport.T


def attnres(rule, params, branches, x):
    """Attention Residuals: sources are finished blocks and the open one."""
    finished, partial = [x], None

    def mix(p):
        sources = finished + ([] if partial is None else [partial])
        keys = [norm(v, p["key_scale"], rule.mix_eps) for v in sources]
        scores = jnp.stack([jnp.sum(k * p["query"], axis=-1) for k in keys])
        scores = scores * jnp.exp(p.get("logit_scale", 0.0))
        if rule.bias:
            scores = scores + p["source_bias"][: len(sources), None, None]
        weights = jnp.exp(scores)
        if rule.topk is not None:
            least = jnp.sort(scores, axis=0)[-math.ceil(rule.topk * len(sources))]
            weights = weights * (scores >= least)
        weights = weights / jnp.sum(weights, axis=0)
        mixture = sum(w[..., None] * v for w, v in zip(weights, sources, strict=True))
        return norm(mixture, p["norm"], rule.mix_eps)

    for s, branch in enumerate(branches):
        p = row(params, s)
        if s % rule.block == 0 and partial is not None:
            finished, partial = [*finished, partial], None
        y = branch(mix(p) if s else norm(x, p["norm"], rule.eps))
        partial = y if partial is None else partial + y
    return mix(params["final"])


def joint_attention(layer, x, entries):
    """Causal attention whose softmax also runs over depth entries (MoDA), head by head.

    Returns (y, key, value), the key before rotation."""
    query, key, value = (
        jnp.einsum("btd,dhe->bthe", x, getattr(layer, name)[...])
        for name in ("query", "key", "value")
    )
    rotated_query, rotated_key = rope(query, layer.rope_theta), rope(key, layer.rope_theta)
    length, heads, size = query.shape[1:]
    outputs = []
    for head in range(heads):
        shared = head * key.shape[2] // heads
        q, k = rotated_query[:, :, head], rotated_key[:, :, shared]
        allowed = jnp.exp(q @ jnp.swapaxes(k, 1, 2) / size**0.5) * jnp.tril(
            jnp.ones((length, length))
        )
        mixed, mass = allowed @ value[:, :, shared], allowed.sum(-1, keepdims=True)
        for depth_key, depth_value in entries:
            weight = jnp.exp(jnp.sum(q * depth_key[:, :, shared], -1, keepdims=True) / size**0.5)
            mixed, mass = mixed + weight * depth_value[:, :, shared], mass + weight
        outputs.append(mixed / mass)
    y = jnp.einsum("bthe,hed->btd", jnp.stack(outputs, axis=2), layer.out[...])
    return y, key, value


def moda(rule, params, branches, x):
    entries, post = [], rule.name == "post_ln_moda"
    for s, branch in enumerate(branches):
        p = row(params, s)
        u = x if post else norm(x, p["norm"], rule.eps)
        if s % 2 == 0:
            y, key, value = joint_attention(branch.layer, u, entries)
        else:
            y = branch(u)
            key, value = (jnp.einsum("btd,dke->btke", u, p["kv_proj"][:, i]) for i in (0, 1))
        entries = [*entries, (key, value)]
        x = norm(x + y, p["norm"], rule.eps) if post else x + y
    return norm(x, params["final"]["norm"], rule.eps)


def total(streams, m):
    return streams


def mean(streams, m):
    return streams / m


NAIVE = {
    "pre_ln": pre_ln,
    "depth_mup": scaled_pre_ln(0.5),
    "completep": scaled_pre_ln(1.0),
    "post_ln": post_ln,
    "sandwich_ln": sandwich_ln,
    "lns": lns,
    "deepnorm": deepnorm,
    "keel": keel,
    "hc": hyper(hc_weights, total),
    "mhc": hyper(mhc_weights, mean),
    "mhc_native": hyper(projected(balanced), total),
    "mhc_lite": hyper(projected(mixed_permutations), total),
    "mhc_static": hyper(mhc_static_weights, total),
    "moda": moda,
    "post_ln_moda": moda,
    "full_attnres": attnres,
    "block_attnres": attnres,
}
