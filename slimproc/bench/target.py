"""Where requests go: a server's URL taken apart, and the heads of the requests to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from slimproc.bench.failures import BadPlan

_PLAIN = re.compile(r"[!-~]+")
"""What may stand in a request's first line or in a header without a second look."""


@dataclass(frozen=True)
class Target:
    """One server. ``prefix`` goes before ``/v1``; ``key`` is sent as a bearer token."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    key: str | None = None

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> Target:
        """``http[s]://HOST[:PORT][/PREFIX][/v1]``. Raises BadPlan."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadPlan(f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not _PLAIN.fullmatch(url):
            raise BadPlan(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
        if parts.query or parts.fragment or parts.username is not None:
            raise BadPlan(f"{url!r}: a server's URL has no query, fragment or user")
        if port == 0:
            raise BadPlan(f"{url!r}: there is no port 0")
        if key is not None and not _PLAIN.fullmatch(key):
            raise BadPlan("--api-key: plain ASCII without spaces, as it goes into a header")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def post(self, route: str, body: bytes) -> bytes:
        """A whole request, ready to be sent."""
        return self._head("POST", route) + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )

    def get(self, route: str) -> bytes:
        return self._head("GET", route) + b"\r\n"

    def _head(self, method: str, route: str) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return f"{method} {self.prefix}{route} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{key}".encode("ascii")
