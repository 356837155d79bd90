"""The site builds strictly, loads nothing from elsewhere, and says what the code says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hzero
from hzero.config import DEFAULT_PRESET, PRESET_NAMES, PRESETS, parse_config
from tests.ranks import ROOT, run_python

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Strict, which --quiet would undo: broken links, missing files, pages without navigation are errors."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = run_python("-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=\"canonical)[^>]*\bhref=\"([^\"]+)", text)
        elsewhere = [address for address in loaded if re.match(r"\w*:?//", address)]
        assert not elsewhere, f"{page}: {elsewhere}"
        assert 'class="mermaid"' not in text, f"{page}: the theme would load Mermaid"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_site_has_every_key_and_every_function(site: Path) -> None:
    text = (site / "configuration.html").read_text()
    block = ("preset", "shard.weights", "codecs.ROLE.TIER.rounding", "node_all_gather.below_bytes", "topology.order")
    for key in (*block, "model.seq_length", "data.path", "train.steps", "checkpoint.keep"):
        assert f"<td><code>{key}</code></td>" in text, key
    presets = re.sub(r"<[^>]+>", "", (site / "presets.html").read_text())
    for name, into in (("ZeRO-3", "966.1 GB"), ("topo", "30.8 GB")):  # of README's table
        assert re.search(rf"^{name}\n(.*\n){{3}}{into}$", presets, flags=re.MULTILINE), name
    for name in {*hzero.__all__} - {"__version__"}:
        assert f'id="hzero.{name}"' in (site / "api.html").read_text(), name


def _rows(head: str) -> dict[str, list[str]]:
    """Rows of the table of presets whose head begins so, by their first cell."""
    table = (DOCS / "presets.md").read_text().partition(f"\n{head}")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", table, flags=re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_table_of_presets() -> None:
    rows = _rows("| preset | weights")
    for name, preset in PRESETS.items():
        codecs = (preset.weights_codec, preset.gradients_codec)
        names = [one if isinstance(one, str) else one["codec"] for one in codecs]
        assert rows[name][:2] == [f"{preset.weights}, {preset.gradients}", ", ".join(names)], name
    assert list(rows) == list(PRESET_NAMES)
    assert [name for name, cells in rows.items() if "the default" in cells[2]] == [DEFAULT_PRESET]


@cache
def _code() -> str:
    """hzero's code, with texts of several lines in one."""
    texts = [path.read_text() for path in (ROOT / "hzero_autoload.py", *(ROOT / "hzero").rglob("*.py"))]
    return re.sub(r"\\(.)", r"\1", re.sub(r'"\s*\n\s*f?"', "", "".join(texts)))


def _quoted() -> Iterator[str]:
    page = (DOCS / "troubleshooting.md").read_text()
    for heading in re.findall(r"^### (`.*)$", page, flags=re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", heading)


@pytest.mark.parametrize("message", [message for message in _quoted() if not message.startswith("AttributeError")])
def test_quoted_message_exists(message: str) -> None:
    """Its fixed parts are texts of the code."""
    for part in message.removeprefix("hzero: ").split("…"):
        assert part.strip(" :;,.()") in _code(), message


def test_block_of_examples_is_inside_zero_optimization() -> None:
    for path in (ROOT / "examples").glob("*.json"):
        zero = json.loads(path.read_text())["zero_optimization"]
        assert zero["stage"] == 3 and parse_config(zero["hzero"]).preset == DEFAULT_PRESET
