"""The report: its figures show the arrays, its page needs nothing else, and greyscale is enough."""

import csv
import dataclasses
import html.parser
import pathlib
import re

import matplotlib
import numpy as np
import pytest
from invented import THRESHOLDS, ratio, subject, upper

from depthjax.report import pairs, profiles, routes, streams
from depthjax.report.build import write_report
from depthjax.report.plate import Plate
from depthjax.report.style import AMOUNT, DISTANCE, bar_style, line_style
from depthjax.report.subject import Subject

MAKERS = {
    "angular_distance": pairs.angular_distance,
    "causal_score": pairs.causal_score,
    "permutation_score": pairs.permutation_score,
    "permutation_score_routing": pairs.routing_permutation_score,
    "late_shares": pairs.late_shares,
    "layer_pruning_loss": profiles.layer_pruning,
    "logit_lens": profiles.logit_lens,
    "layer_maps": profiles.layer_maps,
    "token_collapse": profiles.token_collapse,
    "magnitudes": profiles.magnitudes,
    "path_weights": routes.path_weights,
    "mixing_matrix": routes.mixing_matrix,
    "mixing_summary": routes.mixing_summary,
    "newest_source_weight": routes.newest_source_weight,
    "transport_effective_rank": streams.transport,
}
HEATS = {*list(MAKERS)[:4], "path_weights", "mixing_matrix"}


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    """Two models of different depth, one of which weighs sources, one of which has streams."""
    return [subject("first", 6, 0), subject("second", 4, 1, blocks=True)]


@pytest.fixture(scope="module")
def plates(subjects) -> dict[str, Plate]:
    return {name: make(subjects) for name, make in MAKERS.items()}


def images(plate: Plate) -> list:
    return [axes.images[0] for axes in plate.figure.axes if axes.images]


def test_rows_are_the_arrays(plates, subjects):
    """Every finite value of a matrix stands once among the rows, under its own indices."""
    for name, array, turned in [
        ("causal_score", "score", False),
        ("permutation_score", "score", False),
        ("path_weights", "weights", True),
        ("mixing_matrix", "matrix", False),
    ]:
        for one in subjects:
            values = one.get(name, array)
            values = values.T if turned else values
            found = np.full(values.shape, np.nan)
            for row in plates[name].rows:
                if row[0] == one.name:
                    found[row[1], row[2]] = row[3]
            np.testing.assert_array_equal(found, values)
    for one in subjects:
        rows = {row[1:3]: row[3] for row in plates["logit_lens"].rows if row[0] == one.name}
        for quantity in ("kl", "cross_entropy", "top5_overlap"):
            for depth, value in enumerate(one.get("logit_lens", quantity)):
                assert rows[quantity, depth] == value


def test_distance_goes_up_and_start_across():
    distance = upper(np.zeros((7, 7)))
    distance[2, 5] = 0.25  # from state 2, three layers on
    one = subject("one", 6)
    one = Subject("one", {"angular_distance": {"distance": distance}}, one.meta)
    plate = pairs.angular_distance([one])
    assert plate.columns == ("model", "distance", "start_layer", "angle_over_pi")
    assert ("one", 3, 2, 0.25) in plate.rows
    (image,) = images(plate)
    axes = image.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("start layer ℓ", "distance n")
    left, right, bottom, top = image.get_extent()
    rows, columns = image.get_array().shape
    column = (2 - left) / (right - left) * columns
    row = (3 - bottom) / (top - bottom) * rows
    assert image.origin == "lower"
    assert image.get_array()[int(row), int(column)] == 0.25


def test_skipped_layer_across_affected_layer_up(plates, subjects):
    score = subjects[0].get("causal_score", "score")
    image = images(plates["causal_score"])[0]
    assert image.axes.get_xlabel().startswith("skipped")
    assert image.axes.get_ylabel().startswith("affected")
    np.testing.assert_array_equal(image.get_array().filled(np.nan), score.T)


def test_shares_of_late_pairs_are_told_with_their_rule(plates, subjects):
    plate = plates["late_shares"]
    found = {row[:2]: row[2] for row in plate.rows}
    for one in subjects:
        late = -(-one.meta["layers"] // 4)
        for kind, name in (("causal_score", "R_causal"), ("permutation_score", "R_perm")):
            expected = ratio(one.get(kind, "score"), late, THRESHOLDS[kind])
            assert found[one.name, name] == expected
            pairs_of = pairs.late_pairs(one, kind)
            assert np.mean(pairs_of > THRESHOLDS[kind]) == expected
    below = [axes.get_xlabel() for axes in plate.figure.axes[::2]]
    for text, threshold in zip(below, ("C > 0.45", "P > 0.15"), strict=True):
        assert threshold in text
        assert "first layer ≥ ⌈L/4⌉" in text
        assert threshold in plate.caption


def test_dots_are_what_is_over_the_threshold(plates, subjects):
    for axes, one in zip([i.axes for i in images(plates["causal_score"])], subjects, strict=True):
        dots = {tuple(map(int, at)) for c in axes.collections for at in c.get_offsets()}
        score = one.get("causal_score", "score")
        assert dots == {(s, layer) for s, layer in np.argwhere(np.nan_to_num(score) > 0.45)}


def test_scales_are_common_or_said_not_to_be(plates):
    for name in HEATS:
        found = images(plates[name])
        limits = {(image.norm.vmin, image.norm.vmax) for image in found}
        if name == "path_weights":
            assert len(limits) == len(found) > 1
            assert "each model" in plates[name].scale
        else:
            assert len(limits) == 1
            assert re.search("(one|same) colour scale", plates[name].scale)
    assert not any(plates[name].scale for name in set(plates) - HEATS)


def test_captions_say_what_high_and_low_mean(plates):
    for name, plate in plates.items():
        words = ("dark", "light") if name in HEATS else ("high", "low")
        text = plate.caption.lower()
        assert all(word in text for word in words), name
        assert re.search(r"\b(not|nor|neither|left out)\b", text), name


def luminance(color) -> float:
    """Of the CIE, relative."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_more_is_darker_in_greyscale():
    for color_map in (DISTANCE, AMOUNT):
        colors = color_map(np.linspace(0, 1, 64))
        lightness = np.cbrt([luminance(color) for color in colors])  # as the eye sees it
        assert (np.diff(lightness) < 0).all()
        assert 0.95 > lightness[0] > lightness[-1] + 0.5  # white means undefined


def test_series_differ_without_colour():
    """Seven in a figure have seven markers and hatches; dash and marker together never repeat."""
    assert len({line_style(n)["marker"] for n in range(7)}) == 7
    assert len({bar_style(n)["hatch"] for n in range(7)}) == 7
    assert (
        len({(line_style(n)["marker"], str(line_style(n)["linestyle"])) for n in range(20)}) == 20
    )


class Tags(html.parser.HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.tags, self.ids, self.links, self.refers = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href", "xlink:href", "data", "poster"):
                self.links.append(value)
            elif value and "url(#" in value:
                self.refers.append(value.partition("url(#")[2].partition(")")[0])


@pytest.fixture(scope="module")
def written(subjects, tmp_path_factory) -> pathlib.Path:
    return write_report(subjects, tmp_path_factory.mktemp("report"))


def test_the_page_needs_nothing_else(written):
    text = written.read_text()
    page = Tags(text)
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    assert "@import" not in text
    assert "url(http" not in text
    assert page.tags.count("figure") == page.tags.count("svg") == len(MAKERS)
    files = {path.name for path in written.parent.iterdir()}
    for link in page.links:
        inside = link.startswith(("#", "data:image/png;base64,"))
        assert inside or link in files, link
    assert len(set(page.ids)) == len(page.ids)
    targets = [link[1:] for link in page.links if link.startswith("#")]
    assert set(targets) | set(page.refers) <= set(page.ids)


def test_pictures_and_tables_lie_beside_the_page(written, plates):
    for name, plate in plates.items():
        assert (written.parent / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        with (written.parent / f"{name}.csv").open() as file:
            header, *rows = csv.reader(file)
        assert tuple(header) == tuple(plate.columns)
        assert rows == [[str(cell) for cell in row] for row in plate.rows]


def test_the_summary_and_the_reasons_are_on_the_page(written, subjects):
    text = written.read_text()
    for one in subjects:
        assert f"{one.meta['parameters']:,}" in text
        assert one.meta["not_applicable"]
        for diagnostic, reason in one.meta["not_applicable"].items():
            row = [diagnostic.replace("_", " "), one.name, reason]
            assert "".join(f"<td>{cell}</td>" for cell in row) in text
    for word in ("held-out loss", "R_causal", "R_perm", "look-back", "seed 42", "jax 0"):
        assert word in text


@pytest.mark.parametrize("kept", [["magnitudes"], ["causal_score"], []])
def test_a_report_on_little_is_written(kept, subjects, tmp_path):
    one = subjects[0]
    one = dataclasses.replace(one, arrays={name: one.arrays[name] for name in kept})
    text = write_report([one], tmp_path).read_text()
    assert text.count("<svg") == (2 if kept == ["causal_score"] else len(kept))
    assert "How it was measured" in text


def test_a_model_of_one_layer(tmp_path):
    """No two layers to compare: these figures are left out, the others drawn."""
    one = subject("shallow", 1)
    few = {name: one.arrays[name] for name in ("angular_distance", *THRESHOLDS)}
    text = write_report([dataclasses.replace(one, arrays=few)], tmp_path).read_text()
    assert 'id="angular_distance"' in text
    assert 'id="causal_score"' not in text
    assert 'id="late_shares"' not in text


def test_names_are_escaped(tmp_path):
    one = subject("<b>&co", 4)
    few = {"causal_score": one.arrays["causal_score"], "logit_lens": one.arrays["logit_lens"]}
    text = write_report([dataclasses.replace(one, arrays=few)], tmp_path).read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;co" in text


def test_settings_of_the_user_change_nothing(subjects):
    def picture() -> str:
        return profiles.logit_lens(subjects).svg()

    before = picture()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert picture() == before
