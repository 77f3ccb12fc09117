"""Base URLs and paths: what is read, what is refused, and which spellings mean one server."""

import pytest

from slimproc.config.addresses import BASE_URLS, INFERENCE_PATH, URL_PATH, server_of
from slimproc.config.values import Kind, Listen, Wrong


def refuses(kind: Kind, value: object) -> str:
    with pytest.raises(Wrong) as caught:
        kind.read(value)
    message = kind.explain(value, caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("HTTP://Host.Example:80/", "http://host.example:80"),
        ("https://host", "https://host"),
        ("http://[::1]:9", "http://[::1]:9"),
        ("http://a_b-c:065", "http://a_b-c:65"),
    ],
)
def test_a_base_url_is_scheme_host_and_port(written, read):
    assert BASE_URLS.read(written) == (read,)


@pytest.mark.parametrize(
    "wrong",
    [
        *["127.0.0.1:8080", "host", "ftp://host:1", "http//host", "http://", "http://:80", "http:///x", "unix:/run/x"],
        *[
            "http://host:",
            "http://host:0",
            "http://host:65536",
            "http://host:123456",
            "http://host:x",
            "http://host: 1",
        ],
        *["http://ho st:1", " http://host:1", "http://host:1 ", "http://host:1\n", "http://host\\x:1", "http://hö:1"],
        *["http://300.1.1.1:1", "http://127.1:1", "http://::1:80", "http://[1.2.3.4]:1", "http://[::1", "http://*:1"],
        *["http://-host:1", "http://a..b:1", "http://" + "a" * 3000, "http://[fe80::1%eth0]:1"],
    ],
)
def test_what_is_no_base_url_is_refused(wrong):
    assert "wanted http://HOST:PORT" in refuses(BASE_URLS, wrong)


@pytest.mark.parametrize("wrong", ["http://h:1/v1", "http://h:1//", "http://h:1?a=b", "http://h:1/#x", "http://h/%2e"])
def test_a_base_url_has_nothing_behind_it(wrong):
    assert "and nothing behind it" in refuses(BASE_URLS, wrong)


def test_a_password_in_a_base_url_is_refused_and_not_repeated():
    message = refuses(BASE_URLS, "http://me:hunter2@host:1")
    assert "no user name or password" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("wrong", [None, True, 8080, {}, {"a": 1}])
def test_what_is_no_text_is_no_base_url(wrong):
    assert refuses(BASE_URLS, wrong).startswith("wanted http://HOST:PORT, or a list of such, not ")


def test_several_base_urls_are_several_servers():
    assert BASE_URLS.read(["http://a:1", "http://a:2/"]) == ("http://a:1", "http://a:2")
    assert refuses(BASE_URLS, ["http://a", "http://A:80/"]) == "item 2: http://a:80 is in the list before"
    assert refuses(BASE_URLS, ["http://a:1", "b"]).startswith("item 2: wanted http://HOST:PORT, not 'b'")
    assert "from 1 to 64 items, not 0" in refuses(BASE_URLS, [])
    assert "from 1 to 64 items, not 65" in refuses(BASE_URLS, [f"http://a:{port}" for port in range(1, 66)])
    assert "item 1: wanted http://HOST:PORT" in refuses(BASE_URLS, [["http://a:1"]])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://localhost:1", "http://127.0.0.1:1", True),
        ("http://localhost:1", "http://[::1]:1", True),
        ("http://localhost.:1", "http://[0:0:0:0:0:0:0:1]:1", True),
        ("http://0.0.0.0:1", "http://[::ffff:127.0.0.1]:1", True),
        ("http://host", "http://host:80", True),
        ("https://host", "http://host:443", True),
        ("http://host.:1", "http://host:1", True),
        ("http://127.0.0.2:1", "http://127.0.0.1:1", False),
        ("http://host:1", "http://host:2", False),
        ("http://host:1", "http://host.example:1", False),
        ("https://host", "http://host", False),
    ],
)
def test_two_spellings_of_one_server_are_known_to_be_one(one, other, same):
    servers = [server_of(BASE_URLS.read(url)[0]) for url in (one, other)]
    assert (servers[0] == servers[1]) is same


@pytest.mark.parametrize(
    "path",
    ["/", "/align", "/v1/audio/transcriptions", "/v1/x/", "/a..b", "/...", "/controls", "/v1/control", "/a%20b", "/a;v=1/b", "/~u/(x)"],
)  # fmt: skip
def test_a_path_is_taken_as_it_is(path):
    assert INFERENCE_PATH.read(path) == path


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("", "the path is empty"),
        ("align", "wanted a path that begins with /, not 'align'"),
        ("http://host/x", "wanted a path that begins with /"),
        ("../x", "wanted a path that begins with /"),
        (["/a"], "wanted one path, not a list"),
        ([], "wanted one path, not a list"),
        (None, "wanted a path that begins with /, not nothing"),
        (7, "wanted a path that begins with /, not 7"),
        ("/a?b=c", "no query and no fragment"),
        ("/a#b", "no query and no fragment"),
        ("/a%3fb=c", "hides a character"),
        ("/a%23", "hides a character"),
        ("/a%253fb", "hides a character"),
        ("/a%00", "hides a character"),
        ("/a%0d%0aX:1", "hides a character"),
        ("/a%5c..%5cb", "hides a character"),
        ("/a b", "percent-encode them"),
        ("/a\\b", "percent-encode them"),
        ("/ü", "percent-encode them"),
        ("/a%", "percent-encode them"),
        ("/a%zz", "percent-encode them"),
        ("/a\r\nX: 1", "percent-encode them"),
        ("/..", "cannot step upwards"),
        ("/a/../b", "cannot step upwards"),
        ("/a/./b", "cannot step upwards"),
        ("/a/%2e%2e/b", "cannot step upwards"),
        ("/a/.%2E/b", "cannot step upwards"),
        ("/a%2f..%2fb", "cannot step upwards"),
        ("/a/%252e%252e/b", "cannot step upwards"),
        ("/a/%25252e%25252e/b", "cannot step upwards"),
        ("/a/..;x=1/b", "cannot step upwards"),
        ("//control/load", "has an empty part"),
        ("/a//b", "has an empty part"),
        ("/a%2f/b", "has an empty part"),
        ("/" + "a" * 3000, "wanted a path"),
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused(wrong, why):
    for kind in (URL_PATH, INFERENCE_PATH):
        assert why in refuses(kind, wrong)


@pytest.mark.parametrize(
    "path",
    ["/control", "/control/", "/control/load", "/Control/x", "/%63ontrol/load", "/control%2fload", "/%2563ontrol", "/control;a/load"],
)  # fmt: skip
def test_a_control_path_is_no_inference_path_however_it_is_written(path):
    assert "is a control path" in refuses(INFERENCE_PATH, path)
    assert URL_PATH.read(path) == path


def test_a_listen_address_is_compared_in_the_same_words():
    assert server_of("http://localhost:8000") == ("localhost", Listen().port)
