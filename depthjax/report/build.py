"""The report on one or more models: summary, figures, what does not apply, how it was measured."""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from depthjax.report import pairs, profiles, routes, streams
from depthjax.report.page import Section, Table, write_page
from depthjax.report.plate import Plate
from depthjax.report.subject import Subject

PAGE = "report.html"

_PARTS: Mapping[str, Sequence[Callable[[Sequence[Subject]], Plate | None]]] = {
    "Late layers": [pairs.late_shares, pairs.causal_score, pairs.permutation_score],
    "Representation": [pairs.angular_distance, profiles.logit_lens, profiles.token_collapse],
    "Single layers": [profiles.layer_pruning, profiles.layer_maps, profiles.magnitudes],
    "Routes through the depth": [
        *(routes.path_weights, routes.mixing_matrix, routes.mixing_summary),
        *(routes.newest_source_weight, streams.transport, pairs.routing_permutation_score),
    ],
}

_COLUMNS = (
    "Held-out loss: nats a token, on the windows probed. R_causal, R_perm: shares of pairs of "
    "late layers, below. Angle: between neighbouring states. Useful layers: for which no affine "
    "map stands in. Of the depth mixing matrix M: mean distance (sublayers) and entropy (nats) of "
    "the reads, its numerical rank, and the largest rank of a block below its diagonal, which for "
    "m streams is at most m. Rank of streams: of the product of all transports. –: does not "
    "apply, or was not measured."
)


def write_report(subjects: Sequence[Subject], folder: pathlib.Path) -> pathlib.Path:
    """Writes report.html, and PNG and CSV of every figure, into the folder; returns the page.

    Draws what was measured; what was not, or does not apply, is listed with its reason.
    """
    sections = [Section("Summary", tables=[summary(subjects)], note=_COLUMNS)]
    for title, makers in _PARTS.items():
        plates = [plate for make in makers if (plate := make(subjects)) is not None]
        if plates:
            sections.append(Section(title, plates=plates))
    if missing := _not_applicable(subjects):
        table = Table(("diagnostic", "models", "reason"), missing, text=3)
        sections.append(Section("What does not apply", tables=[table]))
    sections.append(_how(subjects))
    variants = {s.name: s.meta["variant"] for s in subjects}
    lead = ", ".join(n if n == v else f"{n} ({v})" for n, v in variants.items())
    return write_page(folder / PAGE, "What do the layers do?", lead, sections)


def summary(subjects: Sequence[Subject]) -> Table:
    """One row a model; columns without a number for any model are left out."""
    columns = {
        "held-out loss": lambda s: _text(_loss(s), 3),
        "R_causal": lambda s: _percent(s.number("causal_score", "ratio")),
        "R_perm": lambda s: _percent(s.number("permutation_score", "ratio")),
        "angle a layer / π": lambda s: _text(_step(s), 3),
        "useful layers": lambda s: _percent(s.number("usefulness", "score")),
        "look-back": lambda s: _text(_mean(s, "look_back"), 1),
        "entropy": lambda s: _text(_mean(s, "entropy"), 2),
        "rank of M": lambda s: _text(s.number("mixing_matrix", "rank"), 0),
        "block rank of M": lambda s: _text(s.number("mixing_matrix", "semiseparable_rank"), 1),
        "rank of streams": lambda s: _text(
            s.number("transport_effective_rank", "effective_rank"), 2
        ),
    }
    found = {name: [cell(s) for s in subjects] for name, cell in columns.items()}
    found = {name: cells for name, cells in found.items() if set(cells) != {"–"}}
    rows = [
        (
            *(s.name, s.meta["variant"], s.meta["layers"], s.meta["width"]),
            f"{s.meta['parameters']:,}",
            *(cells[number] for cells in found.values()),
        )
        for number, s in enumerate(subjects)
    ]
    header = ("model", "residual", "layers", "width", "parameters", *found)
    return Table(header, rows, text=2)


def _loss(subject: Subject) -> float | None:
    """Of the whole model on the windows, from the first diagnostic that has it."""
    for diagnostic in ("layer_pruning_loss", "permutation_score"):
        loss = subject.number(diagnostic, "baseline_loss")
        if loss is not None:
            return loss
    return subject.number("magnitudes", "loss")


def _step(subject: Subject) -> float | None:
    """Mean angle between neighbouring states, over π."""
    distance = subject.get("angular_distance", "distance")
    return None if distance is None else float(np.mean(np.diagonal(distance, 1)))


def _mean(subject: Subject, array: str) -> float | None:
    """Over all reads with a choice: more than one source."""
    values = subject.get("mixing_matrix", array)
    return None if values is None else float(np.nanmean(values[1:]))


def _text(value: float | None, digits: int) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.0%}"


def _not_applicable(subjects: Sequence[Subject]) -> list[tuple[str, str, str]]:
    """(diagnostic, models, reason)."""
    models: dict[tuple[str, str], list[str]] = {}
    for subject in subjects:
        for missing in subject.meta["not_applicable"].items():
            models.setdefault(missing, []).append(subject.name)
    return [
        (diagnostic.replace("_", " "), ", ".join(names), reason)
        for (diagnostic, reason), names in sorted(models.items())
    ]


def _how(subjects: Sequence[Subject]) -> Section:
    """Windows, tokens, seed, versions, time."""
    first = subjects[0].meta
    measured = {
        diagnostic: (count, length, s.meta["tokens"][diagnostic])
        for s in subjects
        for diagnostic, (count, length) in s.meta["windows"].items()
    }
    windows = [
        (
            diagnostic.replace("_", " "),
            f"{count:,} × {length:,}",
            f"{tokens:,}",
            *(_text(s.meta["seconds"].get(diagnostic), 0) for s in subjects),
        )
        for diagnostic, (count, length, tokens) in measured.items()
    ]
    header = ("diagnostic", "windows", "tokens", *(f"seconds, {s.name}" for s in subjects))
    models = [
        (s.name, s.meta["residual"], s.meta.get("source", ""), _versions(s.meta["versions"]))
        for s in subjects
    ]
    return Section(
        "How it was measured",
        f"Windows of held-out text, drawn with seed {first['seed']} (budget {first['budget']}), "
        f"the same for all models, {first['micro_batch']} at a time; means over tokens are summed "
        "in float64. Smaller budgets give noisier numbers.",
        tables=[
            Table(header, windows),
            Table(("model", "residual connection", "from", "versions"), models, text=4),
        ],
    )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
