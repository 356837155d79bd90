"""MkDocs hook: pages next to the code are part of the site, and links between files of the checkout work in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages outside of docs/. They keep their path in the checkout; those of docs/ lose the folder.
BESIDE_THE_CODE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "*/README.md",
    "benchmarks/reports/*.md",
)
#: Address in the theme of the script that docs/offline.js replaces.
SHIM = "https://unpkg.com/iframe-worker/shim"
#: Text and address of a link or picture that is no URL; then an anchor or title.
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)([^)]*)\)")


def _uri(path: Path) -> str:
    """Where a file of the checkout is in the site."""
    if path == ROOT / "README.md":
        return "index.md"
    return path.relative_to(ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/."""
    for pattern in BESIDE_THE_CODE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the checkout into links of the site.

    The site has a copy of every linked file. The link to a folder becomes its text, since the site lists none. A link that
    leads nowhere stays as it is, and the strict build refuses it.
    """
    source = Path(str(page.file.abs_src_path))

    def mapped(link: re.Match[str]) -> str:
        text, address, rest = link.groups()
        target = (source.parent / address).resolve()
        if target.is_dir():
            return text
        if not target.is_file() or not target.is_relative_to(ROOT):
            return link[0]
        uri = _uri(target)
        if files.get_file_from_path(uri) is None:
            if target.suffix == ".md":  # a page that the navigation does not have
                return link[0]
            files.append(File.generated(config, uri, abs_src_path=str(target)))
        return f"[{text}]({os.path.relpath(uri, Path(page.file.src_uri).parent)}{rest})"

    # Odd pieces are blocks of code.
    pieces = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if at % 2 else LINK.sub(mapped, piece) for at, piece in enumerate(pieces))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Replaces the script that searches in pages opened as files, which the theme would load from another host."""
    return output.replace(SHIM, os.path.relpath("offline.js", Path(page.file.dest_uri).parent))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for pages such as 404.html."""
    return output_content.replace(SHIM, "/offline.js")
