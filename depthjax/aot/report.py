"""A plan as tables, within 80 columns."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from depthjax.aot.entry import Entry

WIDTH = 80


def gib(value: float | None) -> str:
    """Bytes of memory: 1.23 GiB, or MiB where that is little."""
    if value is None:
        return "?"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 / 10 else f"{value / 2**20:.1f} MiB"


def big(value: float | None, unit: str) -> str:
    """1.23 GB, 45.6 TFLOP: three digits and a decimal prefix."""
    if value is None:
        return "?"
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value, power = value / 1000, power + 1
    digits = 0 if not power or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {' kMGTP'[power].strip()}{unit}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def verdict(entry: Entry) -> str:
    """Fits, or by how much not."""
    if entry.fits:
        return f"fits, {gib(entry.capacity_bytes - (entry.peak_bytes or 0))} to spare"
    return f"does not fit: {gib(entry.missing_bytes)} too much"


def print_entry(entry: Entry, console: Console) -> None:
    """All figures of one entry, with their grades, and what there is to say of them."""
    title = f"{entry.variant}, {entry.shape}, {entry.program}, {entry.topology}: per device"
    table = Table("figure", "value", "grade", title=title, title_justify="left", width=WIDTH)
    table.columns[0].no_wrap = True
    for name, value, grade in rows(entry):
        table.add_row(name, value, entry.grades.get(grade, grade))
    console.print(table)
    say(entry, console)


def rows(entry: Entry) -> list[tuple[str, str, str]]:
    """(figure, value, grade or the field that has it) of the table of one entry."""
    plural = "" if entry.devices == 1 else "s"
    work = f"{entry.sequences:,} x {entry.tokens:,} tokens on {entry.devices:,} device{plural}"
    found = [
        ("work of one run", work, "formula"),
        (
            "parameters, undivided",
            f"{gib(entry.parameter_bytes)}, {entry.parameters:,}",
            "parameter_bytes",
        ),
    ]
    if entry.optimizer_bytes:
        found.append(("optimizer, undivided", gib(entry.optimizer_bytes), "optimizer_bytes"))
    if entry.cache_bytes:
        found.append(("keys and values, undivided", gib(entry.cache_bytes), "cache_bytes"))
    if entry.history_bytes:
        found.append(("sources over depth", big(entry.history_bytes, "B"), "history_bytes"))
    found += [
        ("arguments in all", gib(entry.argument_bytes), "argument_bytes"),
        ("activations, temporaries", gib(entry.temp_bytes), "temp_bytes"),
        ("peak", gib(entry.peak_bytes), "peak_bytes"),
        ("device memory", f"{gib(entry.capacity_bytes)}: {verdict(entry)}", "peak_bytes"),
        ("FLOPs, model", big(entry.flops_formula, "FLOP"), "flops_formula"),
        ("FLOPs, as compiled", big(entry.flops_compiled, "FLOP"), "flops_compiled"),
        ("HBM traffic", big(entry.hbm_bytes, "B"), "hbm_bytes"),
    ]
    if entry.program.startswith("decode"):
        moved = big(entry.hbm_bytes_per_token, "B")
        found.append(("HBM traffic a token", moved, "hbm_bytes_per_token"))
    for collective in entry.collectives:
        name = f"{collective.kind} over {collective.axes}"
        sent = f"{collective.count:,.0f} times, {big(collective.sent, 'B')} sent"
        found.append((name, sent, "collective_bytes"))
    if not entry.collectives:
        found.append(("collectives", "none", "collective_bytes"))
    if entry.seconds:
        found += [
            ("roofline time", f"{duration(entry.roofline)}, bound by {entry.binding}", "seconds"),
            (
                "  " + ", ".join(entry.seconds),
                ", ".join(map(duration, entry.seconds.values())),
                "seconds",
            ),
            ("MFU ceiling", f"{entry.mfu_ceiling:.1%}", "mfu_ceiling"),
        ]
    found += [
        ("compile time", f"{entry.compile_cpu_s:.1f} CPU seconds", "compile_cpu_s"),
        ("HLO instructions", f"{entry.hlo_instructions or 0:,}", "hlo_instructions"),
    ]
    return found


def say(entry: Entry, console: Console) -> None:
    """What a table has no room for: where it does not fit, buffers and knobs; and notes."""

    def line(text: str) -> None:
        console.print(text, soft_wrap=False, highlight=False, width=WIDTH)

    if not entry.fits:
        line(f"{entry.variant} {verdict(entry)}. The largest buffers:")
        for buffer in entry.largest_buffers:
            line(f"  {buffer}")
        if not entry.largest_buffers:
            line("  not known: the compiler gave up before it made any")
        if entry.knobs:
            line("What would help most (about, by formula):")
        for knob in entry.knobs:
            line(f"  {knob.change} saves {gib(knob.saves)}")
    for note in entry.notes:
        line(f"Note: {entry.variant}: {note}.")


def ratio(value: float | None, first: float | None) -> str:
    return "?" if value is None or not first else f"{value / first:.2f}x"


def print_comparison(entries: Sequence[Entry], console: Console) -> None:
    """Two tables: what a device holds and moves, and what the links and the compiler do; ratios
    against the first entry."""
    first = entries[0]
    title = f"{first.shape}, {first.program}, {first.topology}: per device, against {first.variant}"
    held = Table(title=title, title_justify="left", width=WIDTH, padding=(0, 1))
    held.add_column("residual", no_wrap=True)
    for name in ("peak", "temps", "HBM traffic", "FLOPs", "fits"):
        held.add_column(name, justify="right" if name != "fits" else "left")
    for entry in entries:
        held.add_row(
            entry.variant,
            f"{gib(entry.peak_bytes)}\n{ratio(entry.peak_bytes, first.peak_bytes)}",
            f"{gib(entry.temp_bytes)}\n{ratio(entry.temp_bytes, first.temp_bytes)}",
            f"{big(entry.hbm_bytes, 'B')}\n{ratio(entry.hbm_bytes, first.hbm_bytes)}",
            f"{big(entry.flops_compiled, 'F')}\n"
            f"{ratio(entry.flops_compiled, first.flops_compiled)}",
            "yes" if entry.fits else f"no, {gib(entry.missing_bytes)}\ntoo much",
        )
    console.print(held)
    rest = Table(width=WIDTH)
    rest.add_column("residual", no_wrap=True)
    for name in ("roofline", "bound by", "MFU at most", "sent", "compile", "HLO instr."):
        rest.add_column(name, justify="left" if name == "bound by" else "right")
    for entry in entries:
        rest.add_row(
            entry.variant,
            f"{duration(entry.roofline)}",
            entry.binding or "?",
            "?" if entry.mfu_ceiling is None else f"{entry.mfu_ceiling:.1%}",
            big(entry.collective_bytes, "B"),
            f"{entry.compile_cpu_s:.0f} CPU s",
            f"{entry.hlo_instructions or 0:,}",
        )
    console.print(rest)
    console.print(
        "peak, temps (activations and temporaries), HBM traffic, FLOPs (as compiled), sent: "
        "counted from the executable; roofline and MFU: formula over these and the chip's data "
        "sheet.",
        highlight=False,
        width=WIDTH,
    )
    for entry in entries:
        say(entry, console)
