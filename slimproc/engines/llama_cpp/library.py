"""The bindings to llama.cpp, imported cheaply, and what it logs: warnings and errors to stderr, the rest dropped.

Everything else in this folder reaches native code through ``lib``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import sys
from typing import Any

_WARN, _ERROR, _CONTINUED = 3, 4, 5
_GENERIC = (
    "failed to load model",
    "failed to create context",
    "failed to initialize the context",
    "failed to read tensor",
)
"""Lines that only repeat that something failed; another one says why."""
_PREFIX = re.compile(r"^(?:\w+: |error loading model(?: \w+)?: )+")
"""Names of C++ functions and words that the message around the line says already."""


_SPINS = "3000"
"""How long an OpenMP thread spins at a barrier before it sleeps (libgomp's default is a hundred times more, 16 ms on
some CPUs). Beside a busy process on two cores that made two threads 3 to 20 times slower: they burn the very core that
the thread they wait for needs. 0.1 ms still covers what two threads of one step differ by."""


def _import_bindings() -> Any:
    """``llama_cpp.llama_cpp`` without its package, whose ``__init__`` costs 0.1 s for classes that are not used here."""
    if "llama_cpp" in sys.modules:
        return importlib.import_module("llama_cpp.llama_cpp")
    spec = importlib.util.find_spec("llama_cpp")
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read by libgomp when the library is loaded
    if spec is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'", name="llama_cpp")
    sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)  # never executed: only its __path__ is needed
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except (OSError, RuntimeError) as error:  # the shared library is missing or does not fit this machine
        raise ImportError(str(error)) from error
    finally:
        del sys.modules["llama_cpp"]  # so that whoever imports the package proper gets it whole


lib = _import_bindings()


class NativeLog:
    """What llama.cpp says. ``begin`` starts a new account, ``cause`` is its most telling error line."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self._level = 0

    def begin(self) -> None:
        self._errors.clear()

    def cause(self, otherwise: str) -> str:
        """One line that says why the last native call failed; ``otherwise`` where llama.cpp said nothing."""
        telling = [line for line in self._errors if not any(generic in line for generic in _GENERIC)]
        return _PREFIX.sub("", (telling or self._errors or [otherwise])[-1])

    def take(self, level: int, text: bytes, _user_data: object) -> None:
        if level != _CONTINUED:
            self._level = level
        if self._level not in {_WARN, _ERROR}:
            return
        line = text.decode("utf-8", "replace").strip()
        if not line:
            return
        if self._level == _ERROR:
            self._errors.append(line)
            del self._errors[:-20]
        with contextlib.suppress(OSError):  # nobody reads our stderr any more; that must not disturb a load
            os.write(2, f"llama.cpp: {line}\n".encode())


native_log = NativeLog()
_callback = lib.llama_log_callback(native_log.take)
lib.llama_log_set(_callback, ctypes.c_void_p(0))
atexit.register(lib.llama_log_set, lib.llama_log_callback(), ctypes.c_void_p(0))  # Python goes before llama.cpp does
lib.llama_backend_init()
