"""Pages of the documentation: links, index, size of the README."""

import re

import pytest

from tests.docs.commands import PAGES, ROOT, example_of, first_example

MOST_WORDS = 1200
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def prose(page):
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page):
    """Relative links of a page, as (file, anchor)."""
    for target in _LINK.findall(prose(page)):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield (page.parent / file).resolve() if file else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = [
        f"{file}#{anchor}"
        for file, anchor in links(page)
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert broken == []


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    pages = {page for page in PAGES if page.parent == index.parent}
    assert {file for file, _ in links(index)} | {index} == pages


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < MOST_WORDS


def test_the_readme_shows_the_environment_that_is_tested():
    assert example_of("README.md") == first_example()
