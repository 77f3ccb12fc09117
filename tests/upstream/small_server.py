"""A program that serves HTTP on a port that it is told, for tests of servers that we start. Arguments: the port, then

``children`` (start two more processes, one of them in a session of its own), ``stubborn`` (ignore SIGTERM), ``deaf`` (serve
nothing), ``slow`` (answer 503 for a while), ``late`` (bind its port after a while), ``apart`` (serve in a session of its own), ``leave`` (end the first process, which leaves the others), ``fork`` (leave a server behind
and end well), ``exit N`` (say why and exit with N). It writes one line to each of its outputs, and answers its environment, arguments
and open descriptors to any GET.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = "import time; time.sleep(3600)"


class Handler(http.server.BaseHTTPRequestHandler):
    ready_at = 0.0

    def do_GET(self) -> None:  # the base class calls it so
        late = time.monotonic() < self.ready_at
        body = json.dumps({
            "argv": sys.argv[1:],
            "environ": dict(os.environ),
            "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),  # noqa: PTH208  # names, no paths
            "cwd": str(Path.cwd()),
            "pid": os.getpid(),
        }).encode()  # fmt: skip
        self.send_response(503 if late else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def main(port: int, *manners: str) -> None:
    if "exit" in manners:
        sys.stderr.write("the model is not there\n")
        sys.exit(int(manners[manners.index("exit") + 1]))
    print("a line to stdout", flush=True)
    print("a line to stderr", file=sys.stderr, flush=True)
    if "children" in manners:
        for session in (False, True):
            subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=session)
    if "stubborn" in manners:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "fork" in manners:
        subprocess.Popen([sys.executable, __file__, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return
    if "late" in manners:
        time.sleep(0.5)
    if "apart" in manners:
        subprocess.Popen([sys.executable, __file__, str(port)], start_new_session=True)
    if "deaf" in manners or "apart" in manners:
        time.sleep(3600)
    if "slow" in manners:
        Handler.ready_at = time.monotonic() + 0.3
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
