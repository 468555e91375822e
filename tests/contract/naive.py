"""Every residual connection once more, as the papers print it: Python lists, no state, no masks.

Each function takes (rule, layered parameters, branches, embedding [..., D]) and returns what the LM
head reads. `branches[s]` maps the input of sublayer s to its output.
"""

import jax.numpy as jnp


def norm(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def row(params, s):
    return {name: value[s // 2] for name, value in params[("attention", "mlp")[s % 2]].items()}


def pre_ln(rule, params, branches, x):
    for s, branch in enumerate(branches):
        x = x + branch(norm(x, row(params, s)["norm"], rule.eps))
    return norm(x, params["final"]["norm"], rule.eps)


def attnres(rule, params, branches, x):
    """Attention Residuals, section 3: sources are finished blocks and the open one."""
    finished, partial = [x], None

    def mix(p):
        sources = finished + ([] if partial is None else [partial])
        keys = [norm(v, p["key_scale"], rule.mix_eps) for v in sources]
        scores = jnp.stack([jnp.sum(k * p["query"], axis=-1) for k in keys])
        weights = jnp.exp(scores) / jnp.sum(jnp.exp(scores), axis=0)
        mixture = sum(w[..., None] * v for w, v in zip(weights, sources, strict=True))
        return norm(mixture, p["norm"], rule.mix_eps)

    for s, branch in enumerate(branches):
        p = row(params, s)
        if s % rule.block == 0 and partial is not None:
            finished, partial = [*finished, partial], None
        y = branch(mix(p) if s else norm(x, p["norm"], rule.eps))
        partial = y if partial is None else partial + y
    return mix(params["final"])


NAIVE = {"pre_ln": pre_ln, "full_attnres": attnres, "block_attnres": attnres}
