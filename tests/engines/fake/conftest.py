import pytest
from driving import CONTEXT, Clock

from slimproc.engines.fake import FakeBackend
from slimproc.settings import EngineSettings, FakeSettings


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(clock):
    def make(*, context=CONTEXT, **fake):
        engine = EngineSettings(model="m", backend="fake", context=context, fake=FakeSettings(**fake))
        return FakeBackend(engine, clock=clock, sleep=clock.sleep)

    return make
