"""Windows of held-out text, and the files that `measure` leaves."""

import json

import numpy as np
import pytest
from flax import nnx

from depthjax.data.shards import Shard, TokenSplit
from depthjax.errors import InputError
from depthjax.models import Shape, Transformer
from depthjax.probes import measure as module
from depthjax.probes.diagnostics import DIAGNOSTICS
from depthjax.probes.measure import bootstrap_interval, late_ratio, measure
from depthjax.probes.results import Results, read_arrays, write_arrays
from depthjax.probes.windows import BUDGETS, Windows, draw_windows, probe_windows
from depthjax.residuals import HC, PreLN

SHAPE = Shape(layers=2, width=8, heads=2, kv_heads=2, mlp_width=8)
VOCAB = 31
QUICK = ("permutation_score", "layer_pruning_loss")


def model_of(rule, seed=0):
    return Transformer(SHAPE, VOCAB, rule, init_std=0.3, rngs=nnx.Rngs(seed))


def windows_of(seed=0):
    ids = np.random.default_rng(seed).integers(0, VOCAB, (3, 6), dtype=np.int32)
    return Windows(dict.fromkeys(DIAGNOSTICS, ids), "small", seed)


# Windows


def test_windows_are_pieces_of_files_in_proportion_to_their_starts():
    """Files of 30, 10 and 20 tokens have 20, 0 and 10 starts of windows of 10 tokens."""
    files = [np.arange(30), np.arange(100, 110), np.arange(200, 220)]
    windows = draw_windows(files, 3000, 10, seed=1)
    assert windows.shape == (3000, 10)
    assert np.all(np.diff(windows, axis=1) == 1)
    starts, counts = np.unique(windows[:, 0], return_counts=True)
    assert set(starts) == {*range(20), *range(200, 210)}
    assert np.all(np.abs(counts - 100) < 50)  # five standard deviations


def test_windows_depend_on_the_seed_alone():
    files = [np.arange(1000)]
    np.testing.assert_array_equal(draw_windows(files, 5, 10), draw_windows(files, 5, 10, seed=42))
    assert np.any(draw_windows(files, 5, 10, seed=1) != draw_windows(files, 5, 10, seed=2))


def split_of(tmp_path, tokens):
    np.arange(tokens, dtype="<u2").tofile(tmp_path / "a.npy")
    return TokenSplit("heldout", (Shard(tmp_path / "a.npy", "<u2", tokens),), 0, 1)


def test_budgets_name_every_diagnostic(tmp_path):
    for budget in BUDGETS:
        assert BUDGETS[budget].keys() == DIAGNOSTICS.keys()
    windows = probe_windows(split_of(tmp_path, 1000), "full", longest=64)
    assert windows.ids["causal_score"].shape == (16, 64)
    assert windows.ids["angular_distance"].shape == (128, 64)


def test_text_and_budgets_that_do_not_do_are_refused(tmp_path):
    with pytest.raises(InputError, match="whose longest file has 100"):
        probe_windows(split_of(tmp_path, 100))
    with pytest.raises(InputError, match="no tokens in its heldout split"):
        probe_windows(TokenSplit("heldout", (), 0, 1))
    with pytest.raises(InputError, match="budget is 'smal': did you mean small"):
        probe_windows(split_of(tmp_path, 1000), "smal")


# What is made of the scores


def test_late_pairs_count_from_a_quarter_of_the_depth():
    """DepthBench: of 8 layers those from 2 on, 15 pairs."""
    score = np.full((8, 8), np.nan)
    score[np.triu_indices(8, 1)] = 0.0
    score[0, 1:], score[1, 2:] = 1.0, 1.0  # early: they do not count
    assert late_ratio(score, 0.45) == 0
    score[2, 3], score[6, 7], score[3, 5] = 0.5, 0.46, 0.45
    assert late_ratio(score, 0.45) == 2 / 15


def test_the_bootstrap_agrees_with_the_normal_approximation():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=(400, 1))
    low, high = bootstrap_interval(values)[0]
    spread = 1.96 * values.std() / 20
    np.testing.assert_allclose([low, high], values.mean() + np.array([-spread, spread]), atol=0.03)


# Files


def test_what_does_not_apply_is_named_and_the_rest_goes_on(tmp_path):
    results = measure(
        model_of(HC()),
        windows_of(),
        tmp_path / "hc",
        only=["token_collapse", "transport_effective_rank"],
        name="mine",
    )
    assert results.arrays.keys() == {"transport_effective_rank"}
    assert results.meta["not_applicable"].keys() == {"token_collapse"}
    assert "streams" in results.meta["not_applicable"]["token_collapse"]
    assert (results.meta["name"], results.meta["variant"]) == ("mine", "hc")
    assert (results.meta["streams"], results.meta["late_from"]) == (4, 1)
    found = results.arrays["transport_effective_rank"]
    assert found["by_window"].shape == (3, 6)
    np.testing.assert_allclose(found["effective_rank"], 4, rtol=1e-6)  # HC starts with identities
    np.testing.assert_allclose(found["effective_rank_interval"], 4, rtol=1e-6)
    np.testing.assert_allclose(found["singular_values"], 1, rtol=1e-6)
    assert {path.name for path in (tmp_path / "hc").iterdir()} == {
        "meta.json",
        "transport_effective_rank.npz",
    }


class Stop(Exception):
    pass


def test_a_stopped_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(module, "SAVING_SHARE", 0)
    model, windows = model_of(PreLN()), windows_of()
    whole = measure(model, windows, tmp_path / "whole", only=QUICK)

    def stop(diagnostic, done, steps):
        if (diagnostic, done) == ("layer_pruning_loss", 2):
            raise Stop

    steps = []
    with pytest.raises(Stop):
        measure(model, windows, tmp_path / "stopped", only=QUICK, progress=stop)
    assert Results.load(tmp_path / "stopped").arrays.keys() == {"permutation_score"}
    resumed = measure(
        model,
        windows,
        tmp_path / "stopped",
        only=QUICK,
        progress=lambda *step: steps.append(step),
    )
    assert steps == [("layer_pruning_loss", done, 3) for done in (2, 3)]
    for diagnostic in QUICK:
        for name, array in whole.arrays[diagnostic].items():
            np.testing.assert_array_equal(resumed.arrays[diagnostic][name], array)
    assert not list((tmp_path / "stopped").glob(".*"))


def test_a_damaged_file_is_named(tmp_path):
    write_arrays(tmp_path / "logit_lens.npz", {"kl": np.zeros(9)})
    whole = (tmp_path / "logit_lens.npz").read_bytes()
    for damaged in (b"", b"text", whole[:-30]):
        (tmp_path / "logit_lens.npz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"logit_lens\.npz is missing or damaged"):
            read_arrays(tmp_path / "logit_lens.npz")


def test_other_models_and_windows_are_kept_apart(tmp_path):
    measure(model_of(PreLN()), windows_of(), tmp_path, only=[])
    with pytest.raises(InputError, match="holds diagnostics of pre_ln with other model"):
        measure(model_of(PreLN(), seed=1), windows_of(), tmp_path, only=[])
    with pytest.raises(InputError, match="holds diagnostics of pre_ln with other windows"):
        measure(model_of(PreLN()), windows_of(seed=1), tmp_path, only=[])


def test_bad_input_says_what_would_be_right(tmp_path):
    with pytest.raises(InputError, match="'causal' is no diagnostic: did you mean causal_score"):
        measure(model_of(PreLN()), windows_of(), tmp_path, only=["causal"])
    with pytest.raises(InputError, match=r"holds no meta\.json"):
        Results.load(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"some": "thing"}))
    with pytest.raises(InputError, match="is not what `measure` writes"):
        measure(model_of(PreLN()), windows_of(), tmp_path, only=[])
