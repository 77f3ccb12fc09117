"""Who may import whom: the rooms of the front go strictly down, and engines stand apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slimproc
from slimproc.settings import BACKENDS

ROOT = Path(slimproc.__file__).parent

LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"bench", "chaos"},
    {"server"},
    {"reloader"},
    {"fleet"},
    {"http", "listeners"},
    {"admission"},
    {"chat"},
    {"residency"},
    {"upstream"},
    {"replicas"},
    {"ipc", "stream", "lag"},
    {"reload"},
    {"request", "config", "metrics", "systemd"},
    {"errors", "logs", "settings", "model_path", "threads", "gguf", "cgroups"},
]
"""From the top; rooms of one set may import each other where the list below says so, and everything further down."""
BESIDE = {("stream", "ipc"), ("model_path", "errors"), ("threads", "cgroups"), ("chaos", "bench")}
"""Imports between neighbours of one layer (importer, imported)."""
ENGINES_MAY_IMPORT = {"ipc", "request", "settings", "errors", "model_path", "threads", "gguf"}
BACKENDS_LIBRARIES = {"llama_cpp", "mlx", "mlx_lm"}
HTTP_ROOMS = {"http", "upstream", "cli", "server"}

PLACE = {room: place for place, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """``slimproc.ipc.ring`` is in ``ipc``; the package itself is in no room."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere in it, also inside functions and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they go"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (
                    whole
                    if (ROOT.parent / whole.replace(".", "/")).with_suffix(".py").exists()
                    else (whole if (ROOT.parent / whole.replace(".", "/")).is_dir() else node.module)
                )


EDGES = [(path, imported) for path in modules() for imported in imports(path)]
OURS = [(path, imported) for path, imported in EDGES if imported.split(".")[0] == "slimproc" and imported != "slimproc"]


def test_every_room_has_its_place_in_the_list():
    rooms = {room_of(name_of(path)) for path in modules()} - {"", "engines"}
    assert rooms <= set(PLACE)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_what_is_below_it(path):
    room = room_of(name_of(path))
    if room in ("", "engines"):
        return
    for importer, imported in OURS:
        if importer != path:
            continue
        other = room_of(imported)
        if other == room:
            continue
        assert other != "engines", f"{imported}: the front never imports engines"
        below = PLACE[other] > PLACE[room] or (room, other) in BESIDE
        assert below, f"{room} imports {imported}, which is not below it"


def test_engines_import_only_the_leaves_and_what_crosses_the_border():
    for path, imported in OURS:
        if room_of(name_of(path)) == "engines":
            assert room_of(imported) in ENGINES_MAY_IMPORT | {"engines"}, f"{path.name} imports {imported}"


def test_the_load_generator_knows_nothing_of_the_server_that_it_measures():
    imported = {room_of(imported) for path, imported in OURS if room_of(name_of(path)) == "bench"}
    assert imported == {"bench"}


def test_nobody_but_engines_imports_engines():
    importers = {room_of(name_of(path)) for path, imported in OURS if room_of(imported) == "engines"}
    assert importers == {"engines"}


@pytest.mark.parametrize(
    ("libraries", "rooms"),
    [(BACKENDS_LIBRARIES, {"engines"}), ({"aiohttp"}, HTTP_ROOMS), ({"pynvml"}, {"residency"})],
    ids=["backends", "aiohttp", "pynvml"],
)
def test_a_library_is_imported_only_where_it_belongs(libraries, rooms):
    importers = {room_of(name_of(path)) for path, imported in EDGES if imported.split(".")[0] in libraries}
    assert importers <= rooms


def test_no_module_imports_itself_in_a_circle():
    """A module that is only named for type checkers counts as well: the front has no knots."""
    known = {name_of(path) for path in modules()}
    graph: dict[str, set[str]] = {name: set() for name in known}
    for path, imported in OURS:
        graph[name_of(path)].add(imported)
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle: {' > '.join((*way[way.index(name) :], name))}"
        if name in done or name not in known:
            return
        for following in graph[name]:
            visit(following, (*way, name))
        done.add(name)

    for name in known:
        visit(name, ())


def branches_on(names: set[str], source: str) -> list[int]:
    """The lines on which something depends on one of the names: a comparison with it, a case, an entry of a table that is
    looked up at once, a beginning or an end.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            parts = [key for key in node.value.keys if key is not None]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "__eq__", "find_spec"):
                parts = list(node.args)
            elif isinstance(node.func.value, ast.Dict):
                parts = [key for key in node.func.value.keys if key is not None]
        told = {part.value for each in parts for part in ast.walk(each) if isinstance(part, ast.Constant)}
        if names & {each for each in told if isinstance(each, str)}:
            found.append(node.lineno)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path", [path for path in modules() if room_of(name_of(path)) != "engines"], ids=name_of)
def test_nothing_outside_the_engines_depends_on_a_backends_name(path):
    """What has to be known of a backend is a trait of it in ``settings.py``."""
    assert branches_on(set(BACKENDS), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        'backend == "fake"', '"fake" != model.backend', 'x in ("mlx", "fake")', '"fake" in places', "name.startswith('mlx')",
        'match x:\n case "fake" | "mlx": pass', '{"mlx": 1, "fake": 2}[backend]', '{"mlx": 1}.get(backend)', 'table["fake"]',
        'importlib.util.find_spec("llama_cpp")',
    ],
)  # fmt: skip
def test_such_a_dependence_is_found(source):
    assert branches_on(set(BACKENDS), source) == [1 if "case" not in source else 2] * (2 if "|" in source else 1)


def test_every_exception_from_the_order_is_used():
    edges = {(room_of(name_of(path)), room_of(imported)) for path, imported in OURS}
    assert edges >= BESIDE


def test_the_list_is_read_from_the_code_and_not_empty():
    assert len(OURS) > 100
    assert ("ipc", "errors") in {(room_of(name_of(path)), room_of(imported)) for path, imported in OURS}
