"""The dated report of a comparison: tables and figures computed from its rows, in a text written by hand."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.results import Comparison, read
from benchmarks.rows import line_of
from hzero.errors import ConfigError
from hzero.files import replacing

NAME = "comparison"
_TEMPLATE = Path(__file__).with_name("template.md")
_FIELD = re.compile(r"\{\{([\w:-]+)\}\}")


def write_report(
    paths: Sequence[Path], output: Path, *, name: str = NAME, date: str | None = None, overwrite: bool = False
) -> tuple[Comparison, list[Path]]:
    """Writes a report: DATE-NAME.md, its figures, and DATE-NAME.jsonl with the rows that count.

    Args:
        paths: Results folders or files of rows.
        output: Folder of the report, created if missing.
        name: Second part of the files' names.
        date: First part, as YYYY-MM-DD; None for the date of the newest row.
        overwrite: Whether a report of the same name may be replaced.

    Returns:
        What was reported, and the files, the text first.

    Raises:
        ConfigError: Rows cannot be read, the report exists, or the folder cannot be written.
    """
    from benchmarks.report.figures import DPI, figures, plt

    comparison = read(paths)
    stem = f"{date or max(row.date for row in comparison.rows).strftime('%Y-%m-%d')}-{name}"
    text = output / f"{stem}.md"
    if text.exists() and not overwrite:
        raise ConfigError(f"--output: {str(text)!r} exists; --overwrite replaces it, --name gives another name")
    images: dict[str, bytes] = {}
    for end, figure in figures(comparison).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=DPI)
        plt.close(figure)
        images[f"{stem}-{end}.png"] = buffer.getvalue()
    rows = "".join(map(line_of, comparison.rows))
    files = {**images, f"{stem}.jsonl": rows.encode(), text.name: document(comparison, stem, images).encode()}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for target, content in files.items():  # the text last, when all that it shows is there
            with replacing(output / target, "wb") as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {str(output)!r}: {error.strerror}") from None
    return comparison, [output / target for target in reversed(files)]


def document(comparison: Comparison, stem: str, images: Sequence[str] | dict[str, bytes]) -> str:
    """The text of a report: the template with its fields filled in.

    A section of the template is left out if none of its tables was measured, a paragraph if its field is empty.

    Args:
        comparison: What to report.
        stem: DATE-NAME.
        images: Names of the figures.
    """
    from benchmarks.report import tables
    from benchmarks.report.layouts import layouts

    detailed = comparison.detailed()
    labels = dict.fromkeys(row.label for result in comparison.results for row in result.rows)
    fields = {
        "title": "Comparison on an emulated cluster" if labels else "Codecs by parallel dimension",
        "schemes": "; ".join(labels),
        "command": "make bench" if labels else "python -m benchmarks.hybrid",
        "date": stem[:10],
        "stem": stem,
        "machines": tables.machines(comparison),
        "notes": "\n".join(f"- {note}" for note in comparison.notes),
        "step_times": "\n\n".join(map(tables.step_times, detailed)),
        "traffic": "\n\n".join(map(tables.traffic, detailed)),
        "memory": "\n\n".join(map(tables.memory, detailed)),
        **{suite: tables.series_table(comparison, suite) for suite in ("accumulation", "sweep")},
        **{suite: tables.ablation(comparison, suite) for suite in ("codecs", "shards")},
        "choices": tables.choices(comparison),
        "losses": tables.losses(comparison),
        "layouts": layouts(comparison.layouts),
        "measured": tables.measured(comparison),
        **{f"image:{name[len(stem) + 1 : -len('.png')]}": name for name in images},
    }
    sections = re.split(r"\n(?=## )", _TEMPLATE.read_text(encoding="utf-8"))
    return "".join(_section(section, fields) for section in sections).rstrip("\n") + "\n"


def _section(section: str, fields: dict[str, str]) -> str:
    names = [name for name in _FIELD.findall(section) if not name.startswith("image:")]
    if names and not any(fields[name] for name in names):
        return ""
    parts = re.split(r"\n(?=### )", section)
    if len(parts) > 1:
        return "".join(_section(part, fields) for part in parts)
    paragraphs = [
        _FIELD.sub(lambda found: fields[found[1]], paragraph)
        for paragraph in section.strip("\n").split("\n\n")
        if all(fields.get(name) for name in _FIELD.findall(paragraph))
    ]
    return "\n\n".join(paragraphs) + "\n\n"
