"""The diagnostics against the DepthBench authors' analysis scripts, on their models.

By default one diagnostic of each kind in each family; `pytest -m proof tests/parity/test_probes.py`
runs all of them on all models.
"""

import numpy as np
import pytest
from test_depthbench import EXPERIMENTAL, FIXTURES, load

from depthjax.probes.diagnostics import DIAGNOSTICS
from depthjax.probes.fold import Batches

pytestmark = pytest.mark.jax_version

# Diagnostic -> for each of its arrays the authors' tensor, or a column of it.
ARRAYS = {
    "angular_distance": {"distance": "analysis.angular"},
    "causal_score": {"score": "analysis.causal"},
    "permutation_score": {"score": "analysis.permutation"},
    "permutation_score_routing": {"score": "analysis.permutation"},
    "layer_pruning_loss": {
        "loss": "analysis.layer_pruning_loss",
        "baseline_loss": "analysis.baseline_loss",
    },
    "logit_lens": {
        "cross_entropy": ("analysis.logit_lens", 0),
        "kl": ("analysis.logit_lens", 1),
        "top5_overlap": ("analysis.logit_lens", 2),
    },
    "usefulness": {
        "linear_loss": "analysis.usefulness_linear_loss",
        "baseline_loss": "analysis.usefulness_baseline_loss",
    },
    "jacobian_norms": {"norms": "analysis.jacobian_norms"},
    "token_collapse": {
        "stable_rank": ("analysis.token_collapse", 0),
        "effective_rank": ("analysis.token_collapse", 1),
        "l1_over_l2": ("analysis.token_collapse", 2),
    },
    "path_weights": {"weights": "rederived.path_weights"},
    "newest_source_weight": {"weight": "rederived.newest_source_weight"},
    "transport_effective_rank": {
        "effective_rank": "rederived.transport_erank",
        "singular_values": "rederived.transport_singular_values",
    },
}
ON_INPUT_IDS = "path_weights", "newest_source_weight", "transport_effective_rank"
LOOSE = {"usefulness": 1e-4, "jacobian_norms": 1e-4}  # least squares of few rows; D backward passes
# LayerNorm leaves a direction of rounding alone, which their least squares fits in two layers.
ROUNDING = {("deepnorm", "usefulness"): 1e-2}

FEW = {
    "preln": ("token_collapse", "usefulness"),
    "hc": ("angular_distance", "permutation_score_routing", "path_weights"),
    "mhc_liger": ("transport_effective_rank",),
    "attnres_block_b3": ("causal_score", "logit_lens", "newest_source_weight"),
    "attnres_block_b5_uneven": ("layer_pruning_loss",),
    "mhc_static": ("jacobian_norms",),
    "moda_pre": ("usefulness",),
    "keel": ("permutation_score",),
}


def references(case, tensors, diagnostic):
    """{array name: authors' values}; empty where they have none."""
    names = dict(ARRAYS[diagnostic])
    if diagnostic == "permutation_score" and "rederived.permutation_full_swap" in tensors:
        names = {"score": "rederived.permutation_full_swap"}  # theirs moved the connectors alone
    elif diagnostic == "permutation_score_routing" and "hc" not in case:
        names = {}
    found = {}
    for array, name in names.items():
        name, column = name if isinstance(name, tuple) else (name, None)
        if name in tensors:
            found[array] = tensors[name] if column is None else tensors[name][:, column]
    return found


def check(case, diagnostic):
    """The scripts also ran where the numbers say little, so `Residual.limits` is not asked."""
    tensors, _, model = load(case)
    expected = references(case, tensors, diagnostic)
    if not expected:
        return False
    ids = tensors["input_ids" if diagnostic in ON_INPUT_IDS else "analysis.input_ids"]
    found = DIAGNOSTICS[diagnostic](Batches(model, ids)).run()
    atol = ROUNDING.get((case, diagnostic), LOOSE.get(diagnostic, 1e-5))
    for array, reference in expected.items():
        ours = found[array].reshape(reference.shape)
        if diagnostic.startswith("permutation"):  # theirs has zeros where ours has NaN
            upper = np.triu_indices(len(reference), 1)
            ours, reference = ours[upper], reference[upper]
        np.testing.assert_allclose(ours, reference, rtol=0, atol=atol, err_msg=array)
    return True


@pytest.mark.parametrize(
    ("case", "diagnostic"), [(case, name) for case, names in FEW.items() for name in names]
)
def test_a_few_equal_the_authors_numbers(case, diagnostic):
    assert check(case, diagnostic)


@pytest.mark.proof
@pytest.mark.parametrize("case", [case for case in FIXTURES if case not in EXPERIMENTAL])
def test_all_equal_the_authors_numbers(case):
    checked = {diagnostic for diagnostic in ARRAYS if check(case, diagnostic)}
    expected = {"angular_distance", "causal_score", "permutation_score", "layer_pruning_loss"}
    expected |= {"logit_lens", "jacobian_norms"}
    if "hc" in case:
        expected |= {"permutation_score_routing", "path_weights", "transport_effective_rank"}
    else:
        expected |= {"token_collapse"}
    expected |= {"newest_source_weight"} if "attnres" in case else {"usefulness"}
    assert checked == expected
