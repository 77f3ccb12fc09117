"""Faults that no client can ask for, planted in the server's processes as a ``sitecustomize`` and begun by a signal."""

from __future__ import annotations

from pathlib import Path

_PLANTED = """
import ctypes, os, signal, sys, time

_arguments = sys.orig_argv
_engine, _front = "slimproc.engines" in _arguments, "serve" in _arguments

def _spin(*_):
    while True:
        pass

def _keep_the_interpreter(*_):
    ctypes.PyDLL(None).sleep(3600)

def _take_memory(*_):
    taken = []
    while True:
        taken.append(bytearray(b"x" * (1 << 20)))

def _block(*_):
    time.sleep(3600)

if _engine:
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(3))
    signal.signal(signal.SIGWINCH, _spin)
    signal.signal(signal.SIGURG, _keep_the_interpreter)
    signal.signal(signal.SIGIO, _take_memory)
if _front:
    signal.signal(signal.SIGUSR2, _block)
"""


def plant(directory: Path, more: str = "") -> dict[str, str]:
    """The environment of a server whose processes know these faults. ``more``: what else they run at their start, where
    ``_front`` and ``_engine`` say who they are.
    """
    folder = directory / "planted"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_PLANTED + more)
    return {"PYTHONPATH": str(folder)}
