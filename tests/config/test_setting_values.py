"""Each kind of value takes what it says and refuses its neighbours."""

import math

import pytest

from slimproc.config import values
from slimproc.config.values import GIB, KIB, MIB, Listen, Wrong


def refuses(kind: values.Kind, value: object) -> str:
    with pytest.raises(Wrong) as caught:
        kind.read(value)
    return kind.explain(value, caught.value)


def test_an_integer_is_in_its_range_and_neither_boolean_nor_float_nor_text():
    kind = values.integer(1, 256)
    assert (kind.read(1), kind.read(256)) == (1, 256)
    for wrong in (0, 257, True, 4.0, "4", None, [4]):
        assert refuses(kind, wrong).startswith("wanted an integer from 1 to 256, not ")


def test_seconds_are_numbers_above_zero():
    kind = values.seconds()
    assert (kind.read(30), kind.read(0.5)) == (30.0, 0.5)
    assert isinstance(kind.read(30), float)
    for wrong in (0, -1, True, "30", math.nan, math.inf, values.YEAR + 1, None):
        assert "wanted a number of seconds above 0" in refuses(kind, wrong)
    assert values.seconds(zero=True).read(0) == 0.0
    assert "from 0" in refuses(values.seconds(zero=True), -0.1)


@pytest.mark.parametrize("text", ["30s", "1.5 s", "100ms", "2m", "1h"])
def test_a_time_with_a_unit_is_told_that_times_are_seconds(text):
    assert refuses(values.seconds(), text) == f"times are plain numbers of seconds (30, 0.5), not '{text}'"


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (1073741824, GIB),
        ("1GiB", GIB),
        ("500MB", 500_000_000),
        ("4 MiB", 4 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        ("0.5KiB", 512),
        ("1KB", 1000),
        ("12B", 12),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_bytes_or_has_a_unit(written, count):
    assert values.size(0, 1 << 50).read(written) == count


@pytest.mark.parametrize(
    "wrong", ["1", "1G", "1gib", "GiB", "-1GiB", "1,5GiB", "1e3MB", "1GiB ", 1.0, True, None, -1, 1 << 51]
)
def test_a_size_in_another_spelling_or_out_of_range_is_refused(wrong):
    assert "a size in bytes" in refuses(values.size(0, 1 << 50), wrong)


def test_a_size_of_half_a_byte_is_refused():
    assert refuses(values.size(0, GIB), "0.3KiB") == "'0.3KiB' is not a whole number of bytes"


def test_a_ring_is_a_power_of_two():
    kind = values.size(64 * KIB, GIB, power_of_two=True)
    assert kind.read("64KiB") == 65536
    for wrong in ("63KiB", "96KiB", 65537, "2GiB", 0):
        assert "a power of two from 64KiB to 1GiB" in refuses(kind, wrong)


@pytest.mark.parametrize(
    ("written", "host", "port"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000),
        (":8095", None, 8095),
        ("*:8095", None, 8095),
        ("[::1]:8000", "::1", 8000),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("localhost:0", "localhost", 0),
        ("my-host.example.org:65535", "my-host.example.org", 65535),
    ],
)
def test_a_listen_address_is_host_and_port(written, host, port):
    listen = values.LISTEN.read(written)
    assert listen == Listen(host, port)
    assert values.LISTEN.read(str(listen)) == listen


@pytest.mark.parametrize(
    "wrong",
    [
        *["127.0.0.1", "8000", "", ":", "host:", "host:65536", "host:-1", "host:08", "host:8_0", "ho st:1"],
        *["300.1.1.1:1", "1.2.3:80", "[1.2.3.4]:80", "[::1]", "[]:1", "http://host:80", "-host:1", "a..b:1", "unix:/x"],
        *[None, True, ["a:1"]],
    ],
)
def test_what_is_no_address_is_refused(wrong):
    assert "HOST:PORT" in refuses(values.LISTEN, wrong)


def test_a_bare_port_and_a_bare_ipv6_address_are_told_the_right_spelling():
    assert refuses(values.LISTEN, 8000).endswith('for all interfaces write ":8000"')
    assert refuses(values.LISTEN, "::1:8000").endswith("an IPv6 address needs brackets: [::1]:8000")


@pytest.mark.parametrize("name", ["a", "org/model:Q4_K_M", "a b", "ü", "模型", "..", "x" * 256, " padded "])
def test_a_name_may_have_any_printable_characters(name):
    assert values.NAME.read(name) == name


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "\x7f", "a\u2028b", "\ud800", "x" * 257, 7, True, None, ["a"]])
def test_a_name_without_or_with_unprintable_characters_is_refused(name):
    message = refuses(values.NAME, name)
    assert message.isprintable()
    assert len(message) < 200


def test_a_list_of_names_says_which_item_is_wrong():
    assert values.NAMES.read(["a", "b"]) == ("a", "b")
    assert refuses(values.NAMES, ["a", 1]) == "item 2: wanted text, not 1: quote it"
    assert refuses(values.NAMES, "small") == "wanted a list of texts, not 'small'"


def test_a_socket_path_that_the_kernel_would_refuse_is_refused_here():
    assert values.SOCKET_PATH.read("/" + "x" * 99)
    assert "at most 100 bytes" in refuses(values.SOCKET_PATH, "/" + "ü" * 50)
