"""Panics of Rust code under Python, which no ``except Exception`` catches."""

from __future__ import annotations


def is_failure(error: BaseException) -> bool:
    """Whether ``error`` says that the code called has failed: any Exception, and pyo3's PanicException, which is none and
    cannot be imported. What ends a thread or the process on purpose is not one.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
