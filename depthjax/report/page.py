"""One HTML file that holds everything: no script, no font, no picture from elsewhere."""

import dataclasses
import html
import pathlib
from collections.abc import Sequence

from depthjax.data.files import write_atomically
from depthjax.report.plate import Plate

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 40px 32px 64px; background: #fff; color: #1c1c1c;
  font: 16px/1.5 "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 21px; margin: 52px 0 4px; padding-top: 14px; border-top: 2px solid #1c1c1c; }
h3 { font-size: 16px; margin: 30px 0 6px; }
p { max-width: 76ch; margin: 6px 0 12px; }
.lead { color: #555; }
.note { font-size: 13.5px; color: #444; max-width: 100ch; }
nav { margin: 16px 0 22px; font-size: 14px; } nav a { margin-right: 18px; }
a { color: #0b3c78; text-decoration-thickness: 1px; text-underline-offset: 2px; }
figure { margin: 0 0 34px; break-inside: avoid; }
figure svg { display: block; max-width: 100%; height: auto; }
figure text { font-family: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif
  !important; }
figcaption { max-width: 92ch; font-size: 14.5px; color: #333; margin-top: 6px; }
.scale { display: inline-block; font-size: 12.5px; border: 1px solid #999; border-radius: 3px;
  padding: 0 6px; margin-right: 6px; color: #333; }
.files { white-space: nowrap; font-size: 13px; }
table { border-collapse: collapse; font-size: 14px; margin: 10px 0 16px; max-width: 100%; }
.wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0;
  border-bottom: 1px solid #ddd; }
thead th { border-bottom: 1.5px solid #1c1c1c; font-weight: 600; line-height: 1.25; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
@media print {
  @page { size: A4; margin: 12mm; }
  body { padding: 0; max-width: none; font-size: 12px; }
  nav, .files { display: none; } h2, h3 { break-after: avoid; } h2 { margin-top: 28px; }
  figure svg { max-height: 225mm; width: auto; margin: 0; } figcaption { font-size: 11px; }
  tr { break-inside: avoid; } .note { font-size: 10.5px; } .wide { overflow: visible; }
  table { font-size: 9.5px; } th, td { padding: 3px 8px 3px 0; }
}
"""


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells are shown as `str` gives them; the first `text` columns hold text, the others numbers,
    which are set to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    text: int = 1


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page: some text, tables, a note on them, figures."""

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    note: str = ""
    plates: Sequence[Plate] = ()


def write_page(
    file: pathlib.Path, title: str, lead: str, sections: Sequence[Section]
) -> pathlib.Path:
    """Writes the page, and PNG and CSV of every figure into the folder beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for section in sections:
        for plate in section.plates:
            plate.save(file.parent)
    write_atomically(file, page(title, lead, sections).encode())
    return file


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as text."""
    links = "".join(f'<a href="#part-{n}">{_text(s.title)}</a>' for n, s in enumerate(sections))
    links = f"<nav>{links}</nav>\n" if len(sections) > 2 else ""
    body = "".join(_section(n, section) for n, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f'<h1>{_text(title)}</h1>\n<p class="lead">{_text(lead)}</p>\n'
        f"{links}{body}</body>\n</html>\n"
    )


def _section(number: int, section: Section) -> str:
    text = f"<p>{_text(section.text)}</p>\n" if section.text else ""
    note = f'<p class="note">{_text(section.note)}</p>\n' if section.note else ""
    tables = "".join(_table(table) for table in section.tables)
    plates = "".join(_plate(plate) for plate in section.plates)
    return f'<h2 id="part-{number}">{_text(section.title)}</h2>\n{text}{tables}{note}{plates}'


def _plate(plate: Plate) -> str:
    scale = f'<span class="scale">{_text(plate.scale)}</span>' if plate.scale else ""
    files = " · ".join(
        f'<a href="{plate.name}.{kind}">{kind.upper()}</a>' for kind in ("png", "csv")
    )
    return (
        f'<figure id="{plate.name}">\n<h3>{_text(plate.title)}</h3>\n{plate.svg()}\n<figcaption>'
        f'{scale}{_text(plate.caption)} <span class="files">{files}</span>'
        "</figcaption>\n</figure>\n"
    )


def _table(table: Table) -> str:
    numbers = len(table.header) - table.text
    kinds = [""] * table.text + [' class="number"'] * numbers
    header = _cells("th", table.header, kinds)
    rows = "".join(f"<tr>{_cells('td', row, kinds)}</tr>\n" for row in table.rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _cells(tag: str, cells: Sequence[object], kinds: Sequence[str]) -> str:
    return "".join(f"<{tag}{k}>{_text(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True))


def _text(value: object) -> str:
    return html.escape(str(value))
