"""The machine's own systemd as the first process of namespaces of its own, in which our units are installed and run.

Nothing of it touches the machine: /etc is a copy, /run and /var are empty, the network is its own loopback, and killing
the first process ends all others. Needs root, systemd and util-linux; where that is not to be had, ``Unavailable`` says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Self

import psutil

from tests.serving import wait_until

ROOT = Path(__file__).parents[2]
_INIT = next((path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(path).exists()), None)
_SEEN = Path("/opt/lab")
"""Where the interpreter, its packages and our source are seen from inside: the unit's user cannot look into /root."""
_INSTALLED = Path("/opt/slimproc")
"""The environment that the unit starts slimproc from."""

PLANTED = "/run/planted"
"""A folder inside from which Python imports, too."""

_TARGET = """
[Unit]
Description=What the lab boots into
Wants=systemd-journald.service
After=systemd-journald.service
"""


class Unavailable(Exception):
    """This machine cannot boot systemd in a namespace; the message says what is missing."""


class Lab:
    """A booted systemd. ``install`` puts the units there; ``close`` ends it and leaves nothing."""

    def __init__(self, work: Path) -> None:
        """Raises Unavailable."""
        if os.geteuid() != 0:
            raise Unavailable("it takes root")
        for program in ("unshare", "nsenter", "systemctl", "journalctl"):
            if shutil.which(program) is None:
                raise Unavailable(f"there is no {program} (Debian: apt-get install systemd util-linux)")
        if _INIT is None:
            raise Unavailable("systemd is not installed (Debian: apt-get install systemd)")
        self._work = work
        self._log = work / "boot.log"
        self._cgroup = self._make_cgroup()
        self._outer = self._boot()
        try:
            self.init = self._find_init()
            wait_until(self._has_booted, f"systemd has booted; it says: {self._said()}")
        except BaseException as error:
            self.close()
            if isinstance(error, AssertionError):
                raise Unavailable(f"systemd did not boot in a namespace here: {self._said()}") from error
            raise

    # --- booting ------------------------------------------------------------------------------------------------------

    def _make_cgroup(self) -> Path:
        """A cgroup of the lab's own in the unified hierarchy, which becomes the root of what systemd sees."""
        mounted = self._work / "cgroup"
        mounted.mkdir()
        made = subprocess.run(["mount", "-t", "cgroup2", "none", mounted], capture_output=True, text=True, check=False)
        if made.returncode:
            raise Unavailable(f"cgroup2 cannot be mounted: {made.stderr.strip()}")
        cgroup = mounted / f"slimproc-lab-{os.getpid()}"
        try:
            cgroup.mkdir()
        except OSError as error:
            subprocess.run(["umount", mounted], check=False)
            raise Unavailable(f"no cgroup can be made: {error}") from None
        return cgroup

    def _boot(self) -> subprocess.Popen[bytes]:
        shutil.copytree("/etc", self._work / "etc", symlinks=True, ignore_dangling_symlinks=True)
        self._make_environment(self._work / "installed")
        places = {"source": ROOT, "site": Path(sysconfig.get_path("purelib")), "python": Path(sys.base_prefix)}
        script = [
            "set -e",
            f"echo $$ > {self._cgroup}/cgroup.procs",
            "exec unshare --pid --fork --mount --cgroup --uts --ipc --net --propagation private --kill-child=KILL"
            " bash -c " + shlex.quote("\n".join(self._inner(places))),
        ]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                ["bash", "-c", "\n".join(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _make_environment(self, folder: Path) -> None:
        """A virtual environment whose interpreter and packages are this one's, as they are seen from inside."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / "bin").mkdir(parents=True)
        (folder / "pyvenv.cfg").write_text(f"home = {_SEEN}/python/bin\n")
        (folder / "bin" / "python").symlink_to(f"{_SEEN}/python/bin/{version}")
        script = folder / "bin" / "slimproc"
        script.write_text(f"#!{_INSTALLED}/bin/python\nfrom slimproc.cli import main\nmain()\n")
        script.chmod(0o755)
        packages = folder / "lib" / version / "site-packages"
        packages.mkdir(parents=True)
        (packages / "lab.pth").write_text(f"{_SEEN}/source\n{_SEEN}/site\n{PLANTED}\n")

    def _inner(self, places: dict[str, Path]) -> list[str]:
        mounts = []
        for name, place in places.items():
            mounts += [f"mkdir -p {_SEEN}/{name}", f"mount --bind {shlex.quote(str(place))} {_SEEN}/{name}"]
        return [
            "set -e",
            "mount -t proc proc /proc",
            "umount -l /sys/fs/cgroup 2>/dev/null || true",
            "mount -t sysfs sysfs /sys 2>/dev/null || true",
            "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
            f"mount --bind {shlex.quote(str(self._work / 'etc'))} /etc",
            "mount -t tmpfs -o mode=755 tmpfs /opt",
            *mounts,
            f"cp -r {shlex.quote(str(self._work / 'installed'))} {_INSTALLED}",
            f"echo {_SEEN}/python/lib > /etc/ld.so.conf.d/00-lab.conf",
            "for folder in /run /var/lib /var/cache /var/log; do mount -t tmpfs -o mode=755 tmpfs $folder; done",
            "for folder in /tmp /var/tmp; do mount -t tmpfs -o mode=1777 tmpfs $folder; done",
            "ldconfig",
            "mkdir -p /run/lock /run/systemd/system",
            f"printf %s {shlex.quote(_TARGET)} > /run/systemd/system/lab.target",
            "mount --make-rshared /",
            "ip link set lo up 2>/dev/null || true",
            f"exec env -i container=lab PATH=$PATH {_INIT} --system --unit=lab.target --log-target=journal --show-status=no",
        ]

    def _find_init(self) -> int:
        def child() -> int | None:
            assert self._outer.poll() is None, "it has ended"
            return next((one.pid for one in psutil.Process(self._outer.pid).children()), None)

        return int(wait_until(child, "systemd's process is there"))

    def _has_booted(self) -> bool:
        assert self._outer.poll() is None, "it has ended"
        return self.run("systemctl", "is-active", "lab.target", check=False).strip() == "active"

    def _said(self) -> str:
        """What could not be done on the way to systemd, which itself logs to the journal."""
        return self._log.read_text(errors="replace")[-2000:]

    # --- inside -------------------------------------------------------------------------------------------------------

    def run(self, *command: str, check: bool = True, text: str | None = None) -> str:
        """Run a command inside, as root; its stdout."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.init), "-a", *command], capture_output=True, text=True, check=False, input=text,
            timeout=60,
        )  # fmt: skip
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def write(self, path: str, text: str) -> None:
        self.run("mkdir", "-p", str(Path(path).parent))
        self.run("tee", path, text=text)

    def python(self, code: str) -> str:
        """Run a script inside with this very interpreter, as root."""
        return self.run(f"{_INSTALLED}/bin/python", "-c", code)

    def show(self, name: str, unit: str = "slimproc.service") -> str:
        return self.run("systemctl", "show", "-p", name, "--value", unit).strip()

    def wait(self, name: str, value: str, unit: str = "slimproc.service") -> None:
        wait_until(lambda: self.show(name, unit) == value, f"{name} of {unit} is {value}; {self.journal()[-3000:]}")

    def journal(self, unit: str = "slimproc.service") -> str:
        return self.run("journalctl", "-u", unit, "-o", "cat", "--no-pager", check=False)

    def get(self, path: str = "/healthz", limit: float = 30.0) -> int:
        """The status of a GET by a client inside; 0 where no connection can be made."""
        code = (
            "import http.client\n"
            f"c = http.client.HTTPConnection('127.0.0.1', 8000, timeout={limit})\n"
            "try:\n"
            f"    c.request('GET', {path!r}); print(c.getresponse().status)\n"
            "except ConnectionError:\n"
            "    print(0)\n"
        )
        return int(self.python(code))

    def replicas(self) -> list[dict[str, Any]]:
        """From the admin socket."""
        code = (
            "import http.client, socket\n"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(30); s.connect('/run/slimproc/admin.sock')\n"
            "c = http.client.HTTPConnection('admin'); c.sock = s\n"
            "c.request('GET', '/admin/replicas'); print(c.getresponse().read().decode())\n"
        )
        return json.loads(self.python(code))["replicas"]

    def status_of(self, pid: int) -> dict[str, str]:
        """/proc/PID/status of a process inside."""
        lines = self.run("cat", f"/proc/{pid}/status").splitlines()
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def lives(self, pid: int) -> bool:
        return (
            self.run("sh", "-c", f"grep -qv '(.*) [ZX]' /proc/{pid}/stat 2>/dev/null && echo yes || true").strip()
            == "yes"
        )

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._outer.pid, signal.SIGKILL)  # with --kill-child, systemd and all that it started
        self._outer.wait()
        wait_until(lambda: not self._populated(), "every process of the lab is gone")
        for folder in sorted(self._cgroup.rglob("*"), reverse=True):
            if folder.is_dir():
                folder.rmdir()
        self._cgroup.rmdir()
        subprocess.run(["umount", self._work / "cgroup"], check=True)

    def _populated(self) -> bool:
        return "populated 1" in (self._cgroup / "cgroup.events").read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
