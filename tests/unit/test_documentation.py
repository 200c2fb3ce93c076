"""Links of the documentation to files of the repository and to headings on pages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("shmllm/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"#{1,6} +(.+)")
PLACE = re.compile(r'<a id="([^"]+)">')


def headings(page: Path) -> set[str]:
    """What links name the headings of a page by, as GitHub makes it, and its other places."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    is_code = False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_code ^= line.startswith("```")
        found.update(PLACE.findall(line))
        heading = None if is_code else HEADING.fullmatch(line)
        if heading is None:
            continue
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def problem_of(page: Path, link: str) -> str | None:
    """Why a link leads nowhere, or None."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return f"{link}: there is no such file"
    if anchor and target.suffix == ".md" and anchor not in headings(target):
        return f"{link}: the page has no such heading"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [problem for link in links if (problem := problem_of(page, link))] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('# A [b](x) `c`: d\n## Twice\n## Twice\n```\n# no heading\n```\n<a id="e"></a>')
    assert headings(page) == {"a-b-c-d", "twice", "twice-1", "e"}
    assert problem_of(page, "page.md#twice-1") is None
    assert problem_of(page, "#no-heading") == "#no-heading: the page has no such heading"
    assert problem_of(page, "other.md") == "other.md: there is no such file"
