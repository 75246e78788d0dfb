"""Hook of mkdocs: navigation, references made from the code, links that leave the documentation.

Runs in the environment `docs`, without the project's packages. Pages stay as forges render them: the navigation is that
of docs/README.md, and headings get the anchors of GitHub.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / ".cache" / "docs" / "reference.json"
MARKER = re.compile(r"<!-- reference: ([\w-]+) -->")
BOOSTED = {"configuration.md": 3}
"""Pages that a search finds before others, with the factor of their score."""
_SECTION = r"^{} ([^:\n]+).*?\n(.*?)(?=^{} |\Z)"
_ROW = re.compile(r"^\| \[[^\]]+\]\(([\w-]+\.md)\)", re.MULTILINE)
_NAMED = re.compile(r"\[[\w-]+\.md\]\(([\w-]+\.md)")
_LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*")
_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")
_PICTURE = re.compile(r"(!\[[^\]]*\]\()\.\./(recipes/)")


def slug(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    index = (Path(config["docs_dir"]) / "README.md").read_text(encoding="utf-8")
    config["nav"] = ["README.md", *navigation(index)]
    config["mdx_configs"]["toc"]["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the recipes' curves, which lie outside of the documentation."""
    from mkdocs.structure.files import File

    for path in sorted(ROOT.glob("recipes/*/curve.svg")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def navigation(index: str, level: int = 2) -> list[Any]:
    """Return the pages of an index's tables, in groups by its headings: [{title: [page, or a group inside]}]."""
    groups = re.findall(_SECTION.format("#" * level, "#" * level), index, re.DOTALL | re.MULTILINE)
    found = [(title, navigation(body, level + 1) or _ROW.findall(body)) for title, body in groups]
    return [{title: pages} for title, pages in found if pages]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in references, titles for the names of pages, and names for links to files outside of the documentation."""
    if page.file.src_uri in BOOSTED:
        page.meta["search"] = {"boost": BOOSTED[page.file.src_uri]}
    references = json.loads(REFERENCE.read_text(encoding="utf-8"))
    whole = MARKER.sub(lambda found: references[found[1]], markdown)
    whole = _PICTURE.sub(r"\1\2", whole)
    return without_outside_links(_NAMED.sub(lambda found: f"[{_title(found[1])}]({found[1]}", whole))


@cache
def _title(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def without_outside_links(markdown: str) -> str:
    return _OUTSIDE.sub(lambda found: found[1] if "`" in found[1] else f"`{found[2]}`", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Raises ValueError if a page would load something from another site."""
    if _LOADED.search(output):
        raise ValueError(f"{page.file.src_uri} loads {_LOADED.search(output)[0]}")
    return output
