"""ProfileStore: what models were seen to need, kept in the state directory from one run of the server to the next."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec

from slimproc import logs, model_path
from slimproc.config import ModelConfig
from slimproc.errors import LoadFailed
from slimproc.residency.views import Claim
from slimproc.settings import BACKENDS

log = logs.get("slimproc.residency")

_MAX_BYTES = 1 << 20
_FORMAT = 1
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]


class _Entry(msgspec.Struct, frozen=True):
    """``model`` is for people who look into the file."""

    model: str
    load_peak: _Bytes
    run_peak: _Bytes


class _File(msgspec.Struct, frozen=True):
    format: int
    profiles: dict[str, _Entry]


class ProfileStore:
    """A JSON file ``profiles.json``. One that cannot be read or written costs what was learnt, and nothing else."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "profiles.json"
        self._profiles = self._read()
        self.write_failures = 0

    def __repr__(self) -> str:
        return f"<ProfileStore {self._path}, {len(self._profiles)} profiles>"

    def get(self, key: str) -> tuple[int, int] | None:
        """Private bytes at most while it loaded, and while it served."""
        entry = self._profiles.get(key)
        return None if entry is None else (entry.load_peak, entry.run_peak)

    def put(self, key: str, model: str, claim: Claim) -> None:
        """Keep the most that was ever seen: a short life shows less than the next one may need. Written at once, through
        a temporary file: a crash leaves the old one or the new one.
        """
        load, run = self.get(key) or (0, 0)
        entry = _Entry(model, max(load, claim.load_peak), max(run, claim.run_peak))
        if self._profiles.get(key) == entry:
            return
        self._profiles[key] = entry
        try:
            self._write()
        except OSError as error:
            self.write_failures += 1
            log.warning("a measured profile could not be kept", path=str(self._path), reason=error.strerror)

    def _read(self) -> dict[str, _Entry]:
        try:
            if self._path.stat().st_size > _MAX_BYTES:
                raise msgspec.ValidationError("too large")
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("the measured profiles cannot be read", path=str(self._path), reason=str(error)[:200])
            return {}
        return dict(file.profiles) if file.format == _FORMAT else {}

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(_File(_FORMAT, self._profiles)))
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".profiles-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(name, self._path)  # noqa: PTH105  # the name is a string already
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
            raise


def profile_key(model: ModelConfig, kind: str, environ: Mapping[str, str]) -> str | None:
    """Names what a measurement holds for: the file, the engine's version, the kind of device, the settings that cost memory.

    None where there is nothing to measure again: no file of the model's own, or none that is there.
    """
    if model.backend is None or model.path is None:
        return None
    try:
        path = model_path.resolve(model.path, environ)
        status = path.stat()
    except (LoadFailed, OSError):
        return None
    package = BACKENDS[model.backend].package
    try:
        version = metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        version = ""
    settings = msgspec.structs.asdict(model.engine_settings())
    for key in ("model", "path", "fake", "threads", "confine"):
        settings.pop(key, None)
    facts = [str(path), status.st_size, status.st_mtime_ns, model.backend, version, kind, settings]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]
