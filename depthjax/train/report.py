"""What a run leaves for a person: the summary table, summary.json and the loss curve."""

import json
import pathlib
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from depthjax.data.files import write_atomically
from depthjax.train.metrics import json_numbers, read_jsonl


def write_summary(directory: pathlib.Path, summary: dict[str, Any], console: Console) -> None:
    """Writes summary.json and loss.png, and prints the summary as a table."""
    text = json.dumps(json_numbers(summary), indent=2) + "\n"
    write_atomically(directory / "summary.json", text.encode())
    print_table(f"run {directory}", summary, console)
    if picture := plot_losses(directory, summary):
        console.print(f"loss curve: {picture}")
    else:
        console.print('no loss.png: it needs matplotlib, pip install "depthjax[plots]"')


def print_table(title: str, values: dict[str, Any], console: Console) -> None:
    """Two columns: names and values."""
    table = Table(title=title, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over `window` values to either side, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window, 0), np.minimum(index + window + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def plot_losses(directory: pathlib.Path, summary: dict[str, Any]) -> pathlib.Path | None:
    """Draws loss.png from metrics.jsonl; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    records = read_jsonl(directory / "metrics.jsonl")
    train = [(r["step"], r["loss"]) for r in records if np.isfinite(r.get("loss") or np.nan)]
    heldout = [(r["step"], r["heldout_loss"]) for r in records if r.get("heldout_loss") is not None]

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, losses = np.array(train).T
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
        smooth = _smooth(losses, len(losses) // 100)
        axes.plot(steps, smooth, color="tab:blue", linewidth=1.8, label="training")
    if heldout:
        label = f"held out, {heldout[-1][1]:.3f} at the end"
        axes.plot(*np.array(heldout).T, "o-", color="tab:orange", linewidth=1.5, label=label)
    unigram = summary["heldout_unigram_loss"]
    label = f"held out, unigram model: {unigram:.3f}"
    axes.axhline(unigram, color="tab:gray", linestyle="--", linewidth=1.2, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)", title=summary["title"])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = directory / "loss.png"
    figure.savefig(path, dpi=150)
    return path
