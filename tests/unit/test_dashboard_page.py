"""The dashboard's page brings everything that it needs, and lets nothing else in."""

import gzip
import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from coordinator.dashboard import create_app
from coordinator.dashboard.app import DEFAULT_LIMIT, MAX_LIMIT, SECURITY_HEADERS
from coordinator.dashboard.assets import STATIC
from coordinator.registry import Registry

ASSETS = ("static/app.js", "static/charts.js", "static/format.js", "static/style.css")


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    registry = Registry(f"sqlite:///{tmp_path / 'registry.db'}")
    transport = httpx.ASGITransport(create_app(registry))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as opened:
        yield opened
    registry.close()


async def test_every_answer_carries_the_security_headers(client: httpx.AsyncClient) -> None:
    for path in ("/", "/api/v1/overview", "/metrics", "/nothing", "/static/style.css"):
        headers = (await client.get(path)).headers
        for name, value in SECURITY_HEADERS.items():
            assert headers[name] == value
    policy = SECURITY_HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")


async def test_live_answers_are_never_stored_and_files_are_checked_again(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/api/v1/overview")).headers["cache-control"] == "no-store"
    assert (await client.get("/static/app.js")).headers["cache-control"] == "no-cache"


class Page(HTMLParser):
    """Collects what the page refers to, its ids, and inline code."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.inline: list[str] = []
        self._code = False
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.links += [values[name] for name in ("href", "src") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        self.references += values.get("aria-labelledby", "").split()
        self.inline += [n for n in values if n == "style" or n.startswith("on")]
        self._code = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._code and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._code = self._code and tag not in ("script", "style")


async def test_the_page_needs_nothing_from_elsewhere_and_all_it_names_is_served(
    client: httpx.AsyncClient,
) -> None:
    page = Page((await client.get("/")).text)
    assert page.inline == []
    assert page.links
    for link in page.links:
        assert not re.match(r"[a-z]+:|//", link), link
        if not link.startswith("#"):
            assert (await client.get(f"/{link}")).status_code == 200, link
    for asset in ASSETS:
        source = (await client.get(f"/{asset}")).text
        assert not re.search(r"https?://|@import|url\(", source), asset
        for module in re.findall(r'from "\./([a-z]+\.js)"', source):
            assert f"static/{module}" in ASSETS


async def test_labels_and_scripts_refer_to_parts_that_the_page_has(
    client: httpx.AsyncClient,
) -> None:
    page = Page((await client.get("/")).text)
    assert len(page.ids) == len(set(page.ids))
    used = re.findall(r'\$\("([a-z-]+)"\)', (await client.get("/static/app.js")).text)
    assert used
    assert set(used) | set(page.references) <= set(page.ids)


def test_scripts_write_texts_of_members_as_text_only() -> None:
    for script in STATIC.glob("*.js"):
        source = script.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in source, script.name


async def test_plotly_is_served_from_the_installed_package_and_cached(
    client: httpx.AsyncClient,
) -> None:
    first = await client.get("/static/plotly.min.js", headers={"accept-encoding": "identity"})
    assert first.status_code == 200
    assert first.headers["content-type"].startswith("text/javascript")
    assert "plotly.js v" in first.text[:200]
    again = await client.get(
        "/static/plotly.min.js",
        headers={"accept-encoding": "identity", "if-none-match": first.headers["etag"]},
    )
    assert (again.status_code, again.content) == (304, b"")
    assert "max-age" in again.headers["cache-control"]


async def test_plotly_travels_compressed_to_a_browser_that_allows_it(
    client: httpx.AsyncClient,
) -> None:
    request = client.build_request(
        "GET", "/static/plotly.min.js", headers={"accept-encoding": "gzip"}
    )
    answer = await client.send(request, stream=True)
    packed = b"".join([part async for part in answer.aiter_raw()])
    assert answer.headers["content-encoding"] == "gzip"
    assert len(packed) < 2_000_000
    plain = await client.get("/static/plotly.min.js", headers={"accept-encoding": "identity"})
    assert gzip.decompress(packed) == plain.content
    assert plain.headers["etag"] != answer.headers["etag"]


async def test_plotly_finds_the_marks_by_which_it_adds_no_inline_style(
    client: httpx.AsyncClient,
) -> None:
    source = (await client.get("/static/plotly.min.js")).text
    assert 'matches(".no-inline-styles")' in source
    assert '"plotly.js-style-"+' in source
    assert not re.search(r'getElementById\("[0-9a-f]{64}"\)', source)
    assert 'id="plotly.js-style-global" class="no-inline-styles"' in (await client.get("/")).text


def test_the_default_limit_is_within_the_largest() -> None:
    assert 1 <= DEFAULT_LIMIT <= MAX_LIMIT
