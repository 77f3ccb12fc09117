from collections.abc import Callable
from pathlib import Path

import pytest

from slimproc.config import Config, load_config
from slimproc.errors import ConfigError


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Config]:
    """Load a configuration from text (None: no file), with nothing of this machine's in it."""

    def load(text: str | None, *, dotenv: str | None = None, unmeasured: bool = False, **flags: object) -> Config:
        environ = {"HOME": str(tmp_path / "home"), **flags.pop("environ", {})}
        file = tmp_path / "slimproc.yaml"
        if text is not None:
            file.write_text(text, "utf-8")
        if dotenv is not None:
            (tmp_path / ".env").write_text(dotenv, "utf-8")
        return load_config(
            None if text is None else file,
            flags=flags,
            environ=environ,
            dotenv=None if dotenv is None else tmp_path / ".env",
            unmeasured=unmeasured,
        )

    return load


@pytest.fixture
def problems(load: Callable[..., Config], tmp_path: Path) -> Callable[..., list[str]]:
    """The problems of a configuration, a line each, without the directory in front of the file's name."""

    def problems(text: str | None, **given: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, **given)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()

    return problems
