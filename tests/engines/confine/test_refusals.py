"""What a confined process may not do, and what it can do still: each act is tried in a child of its own."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.confine.confined import Confined, Parent

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can confine a process")


@pytest.fixture(scope="module")
def parent() -> Iterator[Parent]:
    with Parent() as process:
        yield process


@pytest.fixture
def confined(tmp_path: Path, parent: Parent) -> Confined:
    return Confined(tmp_path, parent)


@pytest.fixture(scope="module", autouse=True)
def _capable(tmp_path_factory: pytest.TempPathFactory, parent: Parent) -> None:
    reached = Confined(tmp_path_factory.mktemp("capable"), parent).act("0")["reached"]
    if reached != "strict":
        pytest.skip(f"this kernel reaches only {reached!r}")


FILES = {
    "read another file": "OTHER.read_text()",
    "read the users' passwords": "Path('/etc/shadow').read_text()",
    "list another folder": "os.listdir(FOLDER)",
    "write to the model": "MODEL.open('r+b')",
    "cut the model off": "os.truncate(MODEL, 0)",
    "make a file": "(FOLDER / 'new').open('w')",
    "make a temporary file": "open('/tmp/slimproc-test-confined', 'w')",
    "make a folder": "os.mkdir(FOLDER / 'new')",
    "make a link": "os.symlink('/', FOLDER / 'new')",
    "make a hard link": "os.link(MODEL, FOLDER / 'new')",
    "rename the model": "os.rename(MODEL, FOLDER / 'new')",
    "remove the model": "os.unlink(MODEL)",
    "remove a folder": "os.rmdir(FOLDER / 'model')",
    "read the parent's environment": "Path(f'/proc/{PARENT}/environ').read_bytes()",
    "open the parent's memory": "open(f'/proc/{PARENT}/mem', 'rb')",
    "see where the parent's memory is": "Path(f'/proc/{PARENT}/maps').read_text()",
    "see what the parent has open": "os.listdir(f'/proc/{PARENT}/fd')",
    "change the kernel's settings": "open('/proc/sys/kernel/printk', 'w')",
}
PROGRAMS = {
    "run a shell": "subprocess.run(['/bin/sh', '-c', 'true'])",
    "become another program": "os.execv('/bin/true', ['true'])",
    "run a program by descriptor": "os.execve(os.open('/proc/self/exe', os.O_RDONLY), ['python'], {})",
    "run its model": "os.execv(MODEL, ['m'])",
}
PROCESSES = {
    "send the parent a signal": "os.kill(PARENT, 0)",
    "trace the parent": "call('ptrace', 16, PARENT, 0, 0)",
    "be traced": "call('ptrace', 0, 0, 0, 0)",
    "read the parent's memory": "call('process_vm_readv', PARENT, 0, 0, 0, 0, 0)",
    "take a descriptor": "call('pidfd_getfd', os.pidfd_open(os.getpid()), 0, 0)",
    "limit the parent": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE)",
    "move the parent's memory": "call('migrate_pages', PARENT, 0, 0, 0)",
}
NETWORK = {
    "open a TCP socket": "socket.socket(socket.AF_INET)",
    "open a UDP socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "open an IPv6 socket": "socket.socket(socket.AF_INET6)",
    "open a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "open a netlink socket": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
}
KERNEL = {
    "mount a file system": "call('mount', b'none\\0', b'/tmp\\0', b'tmpfs\\0', 0, 0)",
    "become root of a namespace": "call('unshare', 0x10000000)",
    "start a child in a namespace": "call('clone', 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)",
    "enter a namespace": "call('setns', 0, 0)",
    "change its root": "os.chroot('/')",
    "load a program into the kernel": "call('bpf', 0, 0, 0)",
    "open an io_uring": "call('io_uring_setup', 1, 0)",
    "handle page faults": "call('userfaultfd', 1)",
    "count events": "call('perf_event_open', 0, 0, 0, 0, 0)",
    "use the kernel's keys": "call('keyctl', 0, 0, 0, 0, 0)",
    "load a module": "call('init_module', 0, 0, 0)",
    "load another kernel": "call('kexec_load', 0, 0, 0, 0)",
    "reboot": "call('reboot', 0, 0, 0, 0)",
    "set the clock": "call('settimeofday', 0, 0)",
    "open a file by handle": "call('open_by_handle_at', 0, 0, 0)",
    "make a device": "os.mknod(FOLDER / 'new', 0o20600, os.makedev(1, 3))",
}
CODE = {
    "write and execute memory": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
    "make memory executable": "protect(4096, mmap.PROT_READ | mmap.PROT_EXEC)",
    "make a file in memory": "os.memfd_create('code')",
    "open a unix socket": "socket.socket(socket.AF_UNIX)",
}


def table(acts: dict[str, str]) -> list[Any]:
    return [pytest.param(act, id=name) for name, act in acts.items()]


@pytest.mark.parametrize("level", ["strict", "jit"])
@pytest.mark.parametrize("act", table(FILES | PROGRAMS))
def test_no_other_file_is_touched_and_no_other_program_run(confined, act, level):
    before = "os.environ['TMPDIR'] = '/nowhere'"  # where jit may write
    assert confined.refused(act, level, before=before) in ("EACCES", "EPERM", "EXDEV")
    assert confined.model.read_text() == "weights"


@pytest.mark.parametrize("level", ["strict", "jit"])
@pytest.mark.parametrize("act", table(PROCESSES | NETWORK | KERNEL))
def test_no_other_process_no_network_and_no_door_to_the_kernel_is_reached(confined, act, level):
    assert confined.refused(act, level) == "EPERM"


@pytest.mark.parametrize("act", table(CODE))
def test_only_jit_lets_memory_become_code_and_speaks_to_local_services(confined, act):
    assert confined.refused(act) == "EPERM"
    confined.allowed(act, "jit")


def test_jit_leaves_temporary_files_to_compilers(confined):
    (confined.folder / "temporary").mkdir()
    before = "os.environ['TMPDIR'] = str(FOLDER / 'temporary')"
    act = "(FOLDER / 'temporary' / 'x').write_text('y')"
    assert confined.refused(act, before=before) == "EACCES"
    confined.allowed(act, "jit", before=before)


@pytest.mark.parametrize("call", ["call(600)", "call(0x40000000 + 39)", "call('clone3', 0, 0)"])
def test_a_call_that_the_filter_cannot_judge_does_not_exist(confined, call):
    assert confined.refused(call) == "ENOSYS"


def test_files_cannot_grow_even_through_a_descriptor_that_was_open_before(confined):
    before = "opened = OTHER.open('ab', buffering=0)"
    assert confined.refused("opened.write(b'x')", before=before) == "EFBIG"


@pytest.mark.parametrize(
    "act",
    [
        FILES["read another file"], FILES["make a file"], PROGRAMS["run a shell"], NETWORK["open a TCP socket"],
        CODE["write and execute memory"], PROCESSES["send the parent a signal"], PROCESSES["limit the parent"],
    ],
)  # fmt: skip
def test_off_changes_nothing(confined, act):
    confined.allowed(act, "off")
    assert confined.act("Path('/proc/self/status').read_text()", "off")["reached"] == "off"


# --- what an engine needs ---------------------------------------------------------------------------------------------

NEEDED = {
    "read its model": "MODEL.read_text()",
    "map its model": "mmap.mmap(os.open(MODEL, os.O_RDONLY), 0, access=mmap.ACCESS_READ)[:]",
    "look at the machine's memory": "Path('/proc/meminfo').read_text()",
    "look at its own memory": "Path('/proc/self/statm').read_text()",
    "count cores": "os.listdir('/sys/devices/system/cpu')",
    "throw output away": "open('/dev/null', 'r+b', buffering=0).write(b'x')",
    "draw lots": "open('/dev/urandom', 'rb').read(4)",
    "start threads": "[(one.start(), one.join()) for one in [threading.Thread(target=int) for _ in range(4)]]",
    "fork": "os.waitpid(os.fork() or os._exit(0), 0)",
    "import what it has not imported yet": "__import__('sqlite3')",
    "open a library": "ctypes.CDLL('libm.so.6')",
    "give native code callbacks": "[one() for one in [ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7) for _ in range(20)]]",
    "have a pair of sockets": "socket.socketpair()",
    "limit itself": "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))",
    "end itself by a signal": "os.kill(os.getpid(), 0)",
    "run Python again": "subprocess.run([sys.executable, '-c', 'import numpy'], check=True)",
}


@pytest.mark.parametrize("level", ["strict", "jit"])
@pytest.mark.parametrize("act", table(NEEDED))
def test_an_engine_can_do_what_it_must(confined, act, level):
    confined.allowed(act, level)


def test_what_a_confined_process_starts_is_confined_as_well(confined):
    code = f"open({str(confined.other)!r})"
    tried = confined.allowed(f"subprocess.run([sys.executable, '-c', {code!r}], capture_output=True).stderr")
    assert "PermissionError" in tried


def test_threads_that_run_already_are_filtered_and_told_of(confined):
    before = """
go, tried = threading.Event(), []
def late():
    go.wait()
    try:
        socket.socket(socket.AF_INET)
    except OSError as error:
        tried.append(error.errno)
thread = threading.Thread(target=late)
thread.start()
"""
    told = confined.act("(go.set(), thread.join(), tried)[2]", before=before)
    assert told == {"reached": "strict (without Landlock in 1 threads)", "result": f"[{errno.EPERM}]"}


def test_a_folder_that_the_backend_writes_to_stays_open(confined):
    (confined.folder / "state").mkdir()
    act = "(FOLDER / 'state' / 'x').write_text('y')"
    assert confined.refused(act) == "EACCES"
    confined.allowed(act, scratch="[FOLDER / 'state']")


# --- kernels that lack something --------------------------------------------------------------------------------------

WORDS = {errno.ENOSYS: "Function not implemented", errno.EPERM: "Operation not permitted"}


@pytest.mark.parametrize("error", WORDS)
def test_without_landlock_the_rest_holds_and_it_is_said(confined, error):
    before = f"without({error}, LANDLOCK)"
    assert confined.act("0", before=before)["reached"] == f"strict (without Landlock: {WORDS[error]})"
    assert confined.refused("socket.socket()", before=before) == "EPERM"
    assert confined.refused("(FOLDER / 'new').write_text('x')", before=before) == "EFBIG"
    confined.allowed("OTHER.read_text()", before=before)


def test_without_seccomp_the_rest_holds_and_it_is_said(confined):
    before = f"without({errno.ENOSYS}, SECCOMP)"
    assert confined.act("0", before=before)["reached"] == f"strict (without seccomp: {WORDS[errno.ENOSYS]})"
    assert confined.refused("OTHER.read_text()", before=before) == "EACCES"


def test_without_both_it_is_off_and_says_why(confined):
    told = confined.act("OTHER.read_text()", before=f"without({errno.ENOSYS}, LANDLOCK, SECCOMP)")
    words = WORDS[errno.ENOSYS]
    assert told == {"reached": f"off (without Landlock: {words}, seccomp: {words})", "result": "'secret'"}


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_an_older_landlock_is_asked_only_for_what_it_has_and_what_it_lacks_is_said(confined, version):
    before = f"landlock.version = lambda: {version}"
    told = confined.act("MODEL.read_text()", before=before)
    missing = f" (without rules for signals: Landlock {version})" if version < 6 else ""
    assert told == {"reached": f"strict{missing}", "result": "'weights'"}
    assert confined.refused("OTHER.read_text()", before=before) == "EACCES"
