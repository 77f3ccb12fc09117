"""A log line is one line, says what was given to it, and cannot be forged, lost with the program, or made to fail."""

import io
import json
import logging
import os
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc import logs

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (DEBUG  |INFO   |WARNING|ERROR  ) .*")


@pytest.fixture(autouse=True)
def restored_logging():
    root, ours = logging.getLogger(), logging.getLogger("slimproc")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.fixture
def written():
    """Configure, and return what was written to the stream."""

    def configure(level="info", *, json=False):
        stream = io.StringIO()
        logs.configure(level, json=json, stream=stream)
        return stream

    return configure


log = logs.get("slimproc.test")


def test_a_text_line_has_time_level_message_and_fields(written):
    stream = written()

    log.info("generation finished", request_id="abc", tokens=12, ttft_ms=1.23456789, cached=False, error=None)

    line = stream.getvalue()
    assert LINE.fullmatch(line.rstrip("\n"))
    assert line.endswith(" INFO    generation finished request_id=abc tokens=12 ttft_ms=1.23457 cached=false\n")


def test_a_json_line_is_an_object_with_typed_fields(written):
    stream = written(json=True)

    log.warning("engine lost", pid=7, seconds=0.5, gone=True, cause=None)

    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "warning", "logger": "slimproc.test", "message": "engine lost",
        "pid": 7, "seconds": 0.5, "gone": True, "cause": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "v=plain"),
        ("two words", 'v="two words"'),
        ("", 'v=""'),
        ("a=b", 'v="a=b"'),
        ('say "hi"', r'v="say \"hi\""'),
        ("back\\slash", r'v="back\\slash"'),
        ("no\u00a0break", 'v="no\u00a0break"'),
        ("é😀", "v=é😀"),
        (1e9, "v=1000000000"),
        (0.1 + 0.2, "v=0.3"),
        (float("nan"), "v=nan"),
        ([1, "a b"], "v=\"[1, 'a b']\""),
        (ValueError("two words"), 'v="two words"'),
    ],
)
def test_values_are_quoted_where_they_could_be_misread(written, value, shown):
    stream = written()

    log.info("m", v=value)

    assert stream.getvalue().rstrip("\n").endswith("m " + shown)


HOSTILE = [
    ("\r\n13:00:00.000 INFO    forged", r"\r\n13:00:00.000 INFO    forged"),
    ("\x1b[2Jgone", r"\x1b[2Jgone"),
    ("a\x00b\x7f", r"a\x00b\x7f"),
    ("\x85\x9b31m", r"\x85\x9b31m"),
    ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
    ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
    ("\ud800", r"\ud800"),
]


@pytest.mark.parametrize(("value", "shown"), HOSTILE)
def test_what_a_terminal_or_a_reader_of_lines_would_obey_is_escaped(written, value, shown):
    stream = written()

    log.info(f"m{value}", v=value)  # noqa: G004  # a hostile message is the point

    assert stream.getvalue().rstrip("\n").endswith(f'm{shown} v="{shown}"')
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(("value", "shown"), HOSTILE)
def test_json_lines_escape_the_same_and_still_carry_the_value(written, value, shown):
    stream = written(json=True)

    log.info("m", v=value)

    line = stream.getvalue()
    assert not set(line.rstrip("\n")) & set(value) - set(map(chr, range(32, 127)))
    assert json.loads(line)["v"] == (shown if value == "\ud800" else value)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(), max_size=40), st.text(st.characters(), max_size=40), st.booleans())
def test_no_text_makes_a_second_line_or_a_control_character(message, value, as_json):
    stream = io.StringIO()
    logs.configure("info", json=as_json, stream=stream)

    log.info(message, v=value, w="last")

    line = stream.getvalue()
    assert line.endswith("\n")
    assert len(line.splitlines()) == 1
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in line[:-1])
    if as_json:
        fields = json.loads(line)
        assert fields["v"].encode() == value.encode("utf-8", "backslashreplace")
        assert fields["w"] == "last"
    else:
        assert line.endswith(" w=last\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_long_values_and_messages_are_clipped(written, as_json):
    stream = written(json=as_json)

    log.info("m" * 5000, v="v" * 5000, w=[0] * 5000)

    line = stream.getvalue()
    assert "m" * 1000 + "..." in line
    assert "v" * 1000 + "..." in line
    assert len(line) < 3500


def test_a_field_cannot_replace_what_every_json_line_has(written):
    stream = written(json=True)

    log.info("real", level="forged", message_="kept")

    line = json.loads(stream.getvalue())
    assert (line["level"], line["level_"], line["message"], line["message_"]) == ("info", "forged", "real", "kept")


def fail(text):
    try:
        raise ValueError(text)  # noqa: TRY301  # raised to be logged
    except ValueError:
        log.exception("it failed", request_id="abc")


def test_a_traceback_in_text_is_indented_and_cannot_forge_a_line(written):
    stream = written()

    fail("bad\n13:00:00.000 INFO    forged\x1b[2J")

    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR   it failed request_id=abc")
    assert all(line.startswith("    ") for line in rest)
    assert rest[0].strip() == "Traceback (most recent call last):"
    assert rest[-1] == r"    13:00:00.000 INFO    forged\x1b[2J"


def test_a_traceback_in_json_is_one_field_whose_end_is_kept(written):
    stream = written(json=True)

    fail("x" * 50_000 + " the end")

    line = json.loads(stream.getvalue())
    assert line["exception"].endswith("the end")
    assert len(line["exception"]) <= 16_000


def test_exception_outside_of_a_handler_is_just_an_error(written):
    stream = written()

    log.exception("nothing was raised")  # noqa: LOG004

    assert len(stream.getvalue().splitlines()) == 1


class Unprintable:
    def __str__(self):
        raise RuntimeError


class BrokenPipe(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


class AsciiOnly(io.StringIO):
    def write(self, text):
        text.encode("ascii")
        return super().write(text)


@pytest.mark.parametrize("as_json", [False, True])
def test_no_value_can_make_logging_fail(written, as_json):
    stream = written(json=as_json)

    log.info("m", a=Unprintable(), b=1 << 70, c=10**6000, d=float("inf"), e=b"\xff", f=object)

    assert "<Unprintable>" in stream.getvalue()
    assert "1180591620717411303424" in stream.getvalue()


def test_a_broken_stderr_is_not_our_problem(capsys):
    logs.configure("info", stream=BrokenPipe())
    log.info("into the void")

    closed = io.StringIO()
    closed.close()
    logs.configure("info", stream=closed)
    log.info("into the void")

    assert capsys.readouterr() == ("", "")


def test_a_terminal_that_knows_only_ascii_gets_escapes():
    stream = AsciiOnly()
    logs.configure("info", stream=stream)

    log.info("m", v="é😀")

    assert r"v=\xe9\U0001f600" in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "heard"),
    [("debug", "dbg inf wrn err"), ("info", "inf wrn err"), ("warning", "wrn err"), ("error", "err")],
)
def test_the_level_holds_for_ours(written, level, heard):
    stream = written(level)

    for method, message in ((log.debug, "dbg"), (log.info, "inf"), (log.warning, "wrn"), (log.error, "err")):
        method(message)

    assert " ".join(line.split()[2] for line in stream.getvalue().splitlines()) == heard


def test_libraries_are_heard_from_warning_on_and_in_the_same_form(written):
    stream = written()

    logging.getLogger("aiohttp.server").info("chatter")
    logging.getLogger("aiohttp.server").warning("trouble with %s", "x\ny")

    assert stream.getvalue().rstrip("\n").endswith(r"WARNING trouble with x\ny")
    assert len(stream.getvalue().splitlines()) == 1


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        logs.configure("loud")


def test_configuring_again_replaces_the_first_form(written):
    first = written()
    second = written(json=True)

    log.info("once")

    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_made_request_ids_are_unique_and_acceptable():
    made = {logs.make_request_id() for _ in range(1000)}

    assert len(made) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", one) and logs.accept_request_id(one) == one for one in made)


@pytest.mark.parametrize("header", ["a", "A-z_0.9", "x" * 64])
def test_a_harmless_request_id_is_kept(header):
    assert logs.accept_request_id(header) == header


@pytest.mark.parametrize("header", [None, "", "x" * 65, "a b", "a\n", "a\r\nb", "é", "٣", "<x>", 'a"b', "a/b"])
def test_any_other_request_id_is_replaced(header):
    assert re.fullmatch("[0-9a-f]{32}", logs.accept_request_id(header))


@pytest.fixture
def pipe():
    """A pipe as stderr is one under many supervisors: the end to read from, and the stream to write to."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w", encoding="utf-8") as write:
        yield read, write


def test_a_pipe_that_nobody_reads_stops_nobody_and_the_loss_is_told_when_somebody_does(pipe):
    read, write = pipe
    logs.configure("info", stream=write)

    for number in range(5000):  # 64 KiB are full after a thousand
        log.info("a line that nobody reads", number=number)
    os.set_blocking(read.fileno(), False)
    before = read.read().decode()
    log.info("somebody reads again")
    after = read.read().decode()

    kept = before.count("\n")
    assert 0 < kept < 5000
    assert [line.rpartition("number=")[2] for line in before.splitlines()] == [str(n) for n in range(kept)]
    assert after.startswith(f"{5000 - kept} log lines were lost: nobody read them\n")
    assert "somebody reads again" in after


def test_a_line_longer_than_a_pipe_takes_at_once_arrives_whole(pipe):
    read, write = pipe
    logs.configure("info", stream=write)

    log.info("long", **{f"field{number}": "x" * 900 for number in range(20)})

    os.set_blocking(read.fileno(), False)
    assert read.read().decode().count("x" * 900) == 20
