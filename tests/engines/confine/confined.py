"""Runs acts in children that are confined first, and tells which were refused."""

from __future__ import annotations

import errno
import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[3]
_PARENT = """
import ctypes, json, mmap, os, resource, signal, socket, struct, subprocess, sys, threading, traceback
from pathlib import Path
from slimproc.engines import confine
from slimproc.engines.confine import kernel, landlock, seccomp

def try_it(code, output):
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        exec(code, dict(globals()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

for line in sys.stdin:
    theirs, output = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        try_it(json.loads(line), output)
    os.close(output)
    with open(theirs) as pipe:
        said = pipe.read()
    print(json.dumps([os.waitpid(child, 0)[1], said]), flush=True)
"""
_TRY = """
ARM = os.uname().machine == "aarch64"
NUMBERS = {{name: numbers[ARM] for name, numbers in (seccomp.REFUSED | seccomp.EXAMINED).items()}}

def call(name, *arguments):
    return kernel.syscall(NUMBERS.get(name, name), *arguments)

def protect(size, protection):
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if kernel._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        raise OSError(ctypes.get_errno(), "mprotect")

def without(error, *numbers):
    '''A kernel that answers these calls with an error.'''
    program = [(0x20, 0, 0, 0)]
    for number in numbers:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | error)]
    program += [(0x06, 0, 0, 0x7FFF0000)]
    code = b"".join(struct.pack("=HBBI", *one) for one in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    kernel.prctl(38, 1)
    kernel.syscall(SECCOMP, 1, 0, struct.pack("@HP", len(program), ctypes.addressof(buffer)))

LANDLOCK, SECCOMP = 444, 277 if ARM else 317
MODEL, OTHER, FOLDER = Path({model!r}), Path({other!r}), Path({folder!r})
PARENT = os.getppid()
{before}
reached = confine.confine({level!r}, [MODEL], {scratch})
try:
    result = (lambda: {act})()
except OSError as error:
    result = {{"errno": error.errno}}
print(json.dumps({{"reached": str(reached), "result": result if isinstance(result, dict) else repr(result)}}))
"""


class Parent:
    """A process of one thread that has imported what acts need. Each code is tried in a child that it forks."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _PARENT]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, code: str) -> str:
        """What it has printed; an assertion fails when it did not end well."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        assert select.select([self._process.stdout], [], [], 60)[0], f"it does not end: {code}"
        status, said = json.loads(self._process.stdout.readline())
        assert status == 0, said
        return said


class Confined:
    """``act`` is a Python expression, in which MODEL may be read and OTHER, beside its folder, may not. ``before`` are
    statements that run before the child is confined; ``scratch``, an expression: folders that stay open.
    """

    def __init__(self, folder: Path, parent: Parent) -> None:
        self._parent = parent
        self.model, self.other, self.folder = folder / "model" / "m.gguf", folder / "other", folder
        self.model.parent.mkdir()
        self.model.write_text("weights")
        self.other.write_text("secret")

    def act(self, act: str, level: str = "strict", *, before: str = "", scratch: str = "[]") -> dict[str, Any]:
        code = _TRY.format(
            model=str(self.model), other=str(self.other), folder=str(self.folder), level=level, act=act, before=before,
            scratch=scratch,
        )  # fmt: skip
        return json.loads(self._parent.run(code).splitlines()[-1])

    def refused(self, act: str, level: str = "strict", **options: str) -> str:
        """The name of the error; an assertion fails where there was none."""
        result = self.act(act, level, **options)["result"]
        assert isinstance(result, dict), f"{act} was allowed: {result}"
        return errno.errorcode[result["errno"]]

    def allowed(self, act: str, level: str = "strict", **options: str) -> str:
        """What came of it, as Python writes it."""
        result = self.act(act, level, **options)["result"]
        assert not isinstance(result, dict), f"{act} was refused: {errno.errorcode[result['errno']]}"
        return result
