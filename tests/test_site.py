"""The site builds strictly, loads nothing from elsewhere, and says what the code says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hzero
from hzero.config import DEFAULT_PRESET, parse_config
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


def test_site_has_every_function(site: Path) -> None:
    """And tables of keys, which scripts/lint compares with the code."""
    assert "<td><code>codecs.ROLE.TIER.rounding</code></td>" in (site / "configuration.html").read_text()
    for name in {*hzero.__all__} - {"__version__"}:
        assert f'id="hzero.{name}"' in (site / "api.html").read_text(), name


@cache
def _code() -> str:
    """hzero's code, with texts of several lines in one."""
    texts = [path.read_text() for path in (ROOT / "hzero_autoload.py", *(ROOT / "hzero").rglob("*.py"))]
    return re.sub(r"\\(.)", r"\1", re.sub(r'"\s*\n\s*f?"', "", "".join(texts)))


def _quoted() -> Iterator[str]:
    page = (DOCS / "troubleshooting.md").read_text()
    for heading in re.findall(r"^### (`.*)$", page, flags=re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", heading)


@pytest.mark.parametrize("message", _quoted())
def test_quoted_message_exists(message: str) -> None:
    """Its fixed parts are texts of the code."""
    for part in message.removeprefix("hzero: ").split("…"):
        assert part.strip(" :;,.()") in _code(), message


def test_block_of_examples_is_inside_zero_optimization() -> None:
    for path in (ROOT / "examples").glob("*.json"):
        zero = json.loads(path.read_text())["zero_optimization"]
        assert zero["stage"] == 3 and parse_config(zero["hzero"]).preset == DEFAULT_PRESET
