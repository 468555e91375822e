"""Invented measurements, laid out as `depthjax.probes.measure` leaves them."""

import numpy as np

from depthjax.report.subject import Subject

THRESHOLDS = {"causal_score": 0.45, "permutation_score": 0.15, "usefulness": 1.1}


def upper(values: np.ndarray) -> np.ndarray:
    """NaN on and below the diagonal."""
    return np.where(np.triu(np.ones_like(values), 1) > 0, values, np.nan)


def ratio(score: np.ndarray, late: int, threshold: float) -> float:
    pairs = score[late:][np.isfinite(score[late:])]
    return float(np.mean(pairs > threshold)) if pairs.size else np.nan


def arrays_of(layers: int, seed: int, blocks: bool) -> dict[str, dict[str, np.ndarray]]:
    """All diagnostics. blocks: of a model whose reads weigh sources; else of one with streams."""
    random = np.random.default_rng(seed)
    subs, late = 2 * layers, -(-layers // 4)
    causal = upper(random.gamma(1, 0.4, (layers, layers)))
    perm = upper(random.gamma(1, 0.1, (layers, layers)))
    matrix = np.tril(random.dirichlet(np.ones(subs + 1), subs + 1) + (0 if blocks else -0.02))
    matrix = np.where(np.tri(subs + 1) > 0, matrix, np.nan)
    loss = 3 + random.gamma(1, 0.2, layers)
    angles = random.uniform(0.05, 0.3, (layers + 1, layers + 1))
    found = {
        "angular_distance": {"distance": upper(angles)},
        "causal_score": {"score": causal, "ratio": np.float64(ratio(causal, late, 0.45))},
        "permutation_score": {
            "score": perm,
            "ratio": np.float64(ratio(perm, late, 0.15)),
            "baseline_loss": np.float64(3.0),
        },
        "layer_pruning_loss": {
            "loss": loss,
            "baseline_loss": np.float64(3.0),
            "delta": loss - 3.0,
        },
        "logit_lens": {
            "cross_entropy": np.linspace(9, 3, layers + 1),
            "kl": np.linspace(6, 0, layers + 1),
            "top5_overlap": np.linspace(0, 1, layers + 1),
        },
        "path_weights": {"weights": matrix[:subs].T},
        "mixing_matrix": {
            "matrix": matrix,
            "entropy": np.log(np.arange(1, subs + 2)),
            "look_back": np.arange(1, subs + 2) / 2,
            "embedding_weight": 1 / np.arange(1, subs + 2),
            "singular_values": np.linspace(2, 0, subs + 1),
            "rank": np.float64(subs),
            "semiseparable_rank": np.float64(3),
        },
        "magnitudes": {
            "output_rms": np.linspace(0.1, 5, layers + 1),
            "gradient_rms": np.linspace(1e-4, 1e-6, subs),
            "loss": np.float64(3.1),
        },
    }
    if blocks:
        sources = np.minimum(np.arange(subs) + 2, 5)
        newest = random.uniform(0.05, 0.9, subs)
        found["newest_source_weight"] = {"weight": newest, "sources": sources.astype(float)}
    else:
        spectrum = np.array([1, 0.6, 0.5, 0.2])
        found["usefulness"] = {
            "linear_loss": loss,
            "baseline_loss": np.float64(3.0),
            "ratio": loss / 3,
            "score": np.float64(np.mean(loss / 3 > 1.1)),
        }
        found["jacobian_norms"] = {"norms": random.uniform(0.1, 1, layers)}
        ranks = ("stable_rank", "effective_rank", "l1_over_l2")
        found["token_collapse"] = {name: random.uniform(1, 20, layers + 1) for name in ranks}
        found["permutation_score_routing"] = dict(found["permutation_score"])
        found["transport_effective_rank"] = {
            "effective_rank": np.float64(2.6),
            "effective_rank_interval": np.array([2.4, 2.7]),
            "singular_values": spectrum,
            "singular_values_interval": np.stack([spectrum - 0.05, spectrum + 0.05], axis=1),
            "stream_cosine": np.float64(0.4),
            "stream_cosine_interval": np.array([0.35, 0.44]),
            "by_window": random.uniform(0, 1, (3, 6)),
        }
    return found


def subject(name: str, layers: int = 6, seed: int = 0, blocks: bool = False) -> Subject:
    arrays = arrays_of(layers, seed, blocks)
    reason = "its reads weigh no sources, or it has no streams"
    everything = {*arrays_of(layers, 0, True), *arrays_of(layers, 0, False)}
    meta = {
        "name": name,
        "variant": "invented",
        "residual": f"Invented(seed={seed})",
        "layers": layers,
        "width": 64,
        "vocab": 97,
        "parameters": 123456,
        "streams": None if blocks else 4,
        "tokens": dict.fromkeys(arrays, 3 * 16),
        "windows": {diagnostic: [3, 16] for diagnostic in arrays},
        "seed": 42,
        "budget": "small",
        "micro_batch": 4,
        "thresholds": THRESHOLDS,
        "late_from": -(-layers // 4),
        "block_boundaries": list(range(3, 2 * layers, 3)) if blocks else [],
        "not_applicable": dict.fromkeys(sorted(everything - set(arrays)), reason),
        "seconds": dict.fromkeys(arrays, 1.5),
        "versions": {"depthjax": "0", "jax": "0", "backend": "cpu"},
        "done": list(arrays),
    }
    return Subject(name, arrays, meta)
