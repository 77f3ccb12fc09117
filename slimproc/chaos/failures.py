"""What keeps a run from being one."""


class BadRun(ValueError):
    """What was asked for makes no sense; the message says why."""


class ServerFailed(RuntimeError):
    """The server did not come up, or went away by itself."""
