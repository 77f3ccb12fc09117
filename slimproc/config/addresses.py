"""Where a server is and what is asked of it: base URLs and paths, read so strictly that joining them is safe."""

from __future__ import annotations

import ipaddress
import re
from typing import Any
from urllib.parse import unquote

from slimproc.config.problems import shown
from slimproc.config.values import Kind, Wrong, list_of, read_host

_PARTS = re.compile(r"(?i)(https?)://(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::([0-9]{1,5}))?(.*)", re.DOTALL)
_PATH = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})+")
"""What RFC 3986 lets a path consist of; everything else has to be percent-encoded."""
_PLAIN = re.compile(r"[^\x00-\x1f\x7f?#\\]*")
"""What may be left once the percent-encoding is taken off."""
_MAX_LENGTH = 2048

CONTROL = "control"
"""The first part of the control contract's paths, which no inference path may reach."""


def read_base_url(value: Any) -> str:
    """``http://host:port`` in lower case and without a trailing slash. Raises Wrong."""
    if not isinstance(value, str) or len(value) > _MAX_LENGTH:
        raise Wrong
    if "@" in value:
        raise Wrong("a base URL has no user name or password in it")  # and the message does not repeat them
    found = _PARTS.fullmatch(value)
    if found is None:
        raise Wrong(f"wanted http://HOST:PORT, not {shown(value)}")
    scheme, host, port, rest = found.groups()
    if rest not in ("", "/"):
        raise Wrong(f"wanted http://HOST:PORT and nothing behind it, not {shown(value)}: paths have keys of their own")
    try:
        plain_host = read_host(host.strip("[]"))
    except Wrong:
        plain_host = None
    if host.startswith("[") and ":" not in host:
        plain_host = None
    if plain_host is None or (port is not None and not 1 <= int(port) <= 65535):
        raise Wrong(f"wanted http://HOST:PORT, not {shown(value)}")
    return f"{scheme.lower()}://{host.lower()}{'' if port is None else f':{int(port)}'}"


def read_base_urls(value: Any) -> tuple[str, ...]:
    """One base URL or a list of them, none twice."""
    urls = _SEVERAL.read(value) if isinstance(value, list) else (read_base_url(value),)
    servers = [server_of(url) for url in urls]
    for index, server in enumerate(servers):
        if server in servers[:index]:
            raise Wrong(f"item {index + 1}: {urls[index]} is in the list before")
    return urls


def server_of(base_url: str) -> tuple[str, int]:
    """Host and port of a base URL that was read: equal for two spellings of one server. This machine is ``localhost``."""
    found = _PARTS.fullmatch(base_url)
    assert found is not None
    scheme, host, port, _ = found.groups()
    return canonical_host(host.strip("[]")), int(port or (80 if scheme == "http" else 443))


def canonical_host(host: str) -> str:
    """One spelling for all of a host's: no trailing dot, addresses in short form, this machine as ``localhost``."""
    host = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    here = address.is_unspecified or str(address) in ("127.0.0.1", "::1")
    return "localhost" if here else str(address)


def read_url_path(value: Any) -> str:
    """An absolute path without query, fragment or steps upwards, however they are encoded. Raises Wrong."""
    if isinstance(value, list):
        raise Wrong("wanted one path, not a list: there is exactly one")
    if not isinstance(value, str) or len(value) > _MAX_LENGTH:
        raise Wrong
    if not value.startswith("/"):
        raise Wrong(f"wanted a path that begins with /, not {shown(value)}" if value else "the path is empty")
    if "?" in value or "#" in value:
        raise Wrong(f"a path has no query and no fragment; {shown(value)} has one")
    if not _PATH.fullmatch(value):
        raise Wrong(f"{shown(value)} has characters that a URL's path cannot have: percent-encode them")
    for text in _decodings(value):
        if not _PLAIN.fullmatch(text):
            raise Wrong(f"{shown(value)} hides a character in its percent-encoding that a path cannot have")
        parts = [part.partition(";")[0] for part in text.split("/")[1:]]
        if ".." in parts or "." in parts:
            raise Wrong(f"a path cannot step upwards; {shown(value)} has a part that is only dots")
        if "" in parts[:-1]:
            raise Wrong(f"{shown(value)} has an empty part")
    return value


def read_inference_path(value: Any) -> str:
    """The same, and no path of the control contract."""
    path = read_url_path(value)
    if any(text.split("/")[1].partition(";")[0].casefold() == CONTROL for text in _decodings(path)):
        raise Wrong(f"{shown(value)} is a control path: it drives the model's life, and no caller may reach it")
    return path


def _decodings(path: str) -> list[str]:
    """The path, and what is left of it each time that its percent-encoding is taken off."""
    texts = [path]
    while (text := unquote(texts[-1], errors="replace")) != texts[-1]:
        texts.append(text)
    return texts


_WANTED = "http://HOST:PORT, or a list of such"
_URL_SCHEMA = {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://[^\\s/?#@]+/?$", "maxLength": _MAX_LENGTH}
_SEVERAL = list_of(Kind("http://HOST:PORT", read_base_url, schema=_URL_SCHEMA), _WANTED, least=1, most=64)
BASE_URLS = Kind(_WANTED, read_base_urls, scalar=False, schema={"anyOf": [_URL_SCHEMA, dict(_SEVERAL.schema)]})
URL_PATH = Kind(
    "a path that begins with /",
    read_url_path,
    schema={"type": "string", "pattern": "^/[^?#]*$", "maxLength": _MAX_LENGTH},
)
INFERENCE_PATH = URL_PATH._replace(read=read_inference_path)
