"""Pages of the documentation: links, index, size of the README."""

import re

import pytest

from tests.docs.commands import PAGES, ROOT, example_of, first_example

MOST_WORDS = 1200
_OF_PACKAGES = sorted(ROOT.glob("packages/*/README.md"))
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INSTALLS = re.compile(
    r"volley(?!-rl-client\[)[\w-]*\[[a-z]"
    r"|(?<!\w)(?:(?:pip3?|pipx|conda|uv tool|uv pip) (?:install|run|wheel|download)|(?:uv|poetry|pdm) add|--with|uvx)"
    r"(?![^\n;|`]* ['\"]?volley-(?:rl|client)\b)"
    r"""(?: [^\n;|`]*?)?[ '"=]volley(?:-\w+)*(?![\w./:])"""
)
"""Advice to install by a name that is not the project's: `volley` belongs to somebody else on the package index."""
_FOLDERS = ("bridges", "configs", "deploy", "docker", "docs", "packages", "services", "shared", "tools", "volley")
_KINDS = ("*.py", "*.md", "*.js", "*.html", "*.ipynb", "*.sh", "*.toml", "*.yaml", "*.txt", "Dockerfile*")
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


@pytest.mark.parametrize("page", [*PAGES, *_OF_PACKAGES], ids=lambda page: str(page.relative_to(ROOT)))
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


def test_nothing_advises_to_install_somebody_elses_project():
    files = [file for folder in _FOLDERS for kind in _KINDS for file in (ROOT / folder).rglob(kind)]
    texts = {file: file.read_text(encoding="utf-8") for file in {*files, *PAGES, ROOT / "Makefile"}}
    found = [(file.name, hit[0]) for file, text in texts.items() for hit in _INSTALLS.finditer(_joined(text))]
    assert found == []


@pytest.mark.parametrize(
    "advice",
    ["pip install 'volley[tables]'", "install volley[tools]", "pip install -U volley", "uv add volley>=1", "uvx volley",
     "uv pip install \\\n  volley-agents", "pipx run volley", "uv run --with volley x",
     "python -m pip install numpy volley"],
)  # fmt: skip
def test_advice_to_install_the_project_is_found(advice):
    assert _INSTALLS.search(_joined(advice))


@pytest.mark.parametrize(
    "command",
    [
        "uv run python -m volley up",
        "pip install ./bridges/trl",
        "uvx --from volley-rl volley quickstart",
        "pip install volley-rl && volley quickstart",
        "pip install pandas; volley up",
        "--with x volley/a.py",
    ],
)
def test_other_commands_are_no_such_advice(command):
    assert not _INSTALLS.search(_joined(command))


def _joined(text):
    """The text with commands that a backslash continues on one line."""
    return re.sub(r"\\\n\s*", " ", text)
