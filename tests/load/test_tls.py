"""TLS: whom we trust, the records on the wire cut anywhere, and what a broken session becomes."""

import random
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from authority import Authority
from rig import Rig
from scripted import DONE, LAST_CHUNK, Call, answer, chunk, event, head, one_by_one, serve

from fastload import _timing as t
from fastload.errors import PlanError, TargetError
from fastload.load.target import list_models
from fastload.load.target_address import Way
from fastload.load.tls import TlsOptions, context

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def models(call: Call) -> None:
    body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
    call.finish(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


# ---------------------------------------------------------------- the stream


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["TLS 1.2", "TLS 1.3"])
def test_a_stamp_lies_between_the_servers_send_and_the_read(authority: Authority, newest: ssl.TLSVersion) -> None:
    with serve(one_by_one, tls=authority.server(newest=newest)) as server:
        rig = Rig(1, server.port, context=authority.trusting()).begin(1, 2)
        rig.open(0, connect_ns=5).arm(2).finish()
    for number, row in enumerate(rig.rows):
        events = rig.stream(number)
        assert [one["channel"] for one in events] == [t.CH_CONTENT] * 3 + [t.CH_DONE]
        assert not any(one["flags"] & (t.FL_READ | t.FL_CLAMPED) for one in events)
        assert not any(one["flags"] & t.FL_COALESCED for one in events[:3])
        for (sent, _), one in zip(server.requests[number].sends[1:], events, strict=True):
            assert sent - 20_000 <= one["stamp_ns"] <= one["stamp_ns"] + one["delay_ns"] <= t.now_ns()
        assert row["stamp_source"] == 1 and row["sent_ns"] <= row["first_byte_ns"]
    first, second = rig.rows
    assert first["connect_ns"] == 5 and first["tls_ns"] > 0 and first["conn_reused"] == 0
    assert second["connect_ns"] == second["tls_ns"] == -1 and second["conn_reused"] == 1
    assert rig.count("stray_bytes") == 0, "session tickets are no bytes of an answer"


def sliced(cut: Callable[[bytes], list[bytes]]) -> Callable[[Call], None]:
    """A script that sends an answer of 40 events, a record each, as `cut` cuts the records' bytes."""

    def script(call: Call) -> None:
        parts = [head(), *(chunk(event(f"t{i} ")) for i in range(40)), chunk(FINISH), chunk(DONE) + LAST_CHUNK]
        for piece in cut(b"".join(call.sock.seal(part) for part in parts)):  # type: ignore[attr-defined]
            call.sock.plain.sendall(piece)  # type: ignore[attr-defined]
        call.account(False)

    return script


def at_random(data: bytes) -> list[bytes]:
    rng = random.Random(7)
    points = sorted(rng.sample(range(1, len(data)), 200))
    return [data[a:b] for a, b in zip([0, *points], [*points, len(data)], strict=True)]


@pytest.mark.parametrize(
    "cut", [lambda data: [data], lambda data: [data[i : i + 1] for i in range(len(data))], at_random],
    ids=["whole", "byte by byte", "at random"],
)
def test_records_cut_anywhere_give_the_same_answer(
    authority: Authority, cut: Callable[[bytes], list[bytes]]
) -> None:
    with serve(sliced(cut), tls=authority.server()) as server:
        rig = Rig(1, server.port, context=authority.trusting()).open(0).begin(1, 1).arm(1).finish()
    (row,) = rig.rows
    assert (row["end"], row["events"], row["http_status"]) == (t.END_COMPLETE, 42, 200)
    assert [one["channel"] for one in rig.stream(0)][:40] == [t.CH_CONTENT] * 40


def test_a_record_begun_behind_an_event_makes_its_stamp_an_upper_bound(authority: Authority) -> None:
    def script(call: Call) -> None:
        call.send(head())
        call.sleep(0.05)
        one, two = (call.sock.seal(chunk(event(text))) for text in "ab")  # type: ignore[attr-defined]
        call.sock.plain.sendall(one + two[:9])  # type: ignore[attr-defined]
        call.sleep(0.05)
        call.sock.plain.sendall(two[9:])  # type: ignore[attr-defined]
        call.sleep(0.05)
        call.finish(chunk(DONE) + LAST_CHUNK)  # the end follows [DONE] in its read

    with serve(script, tls=authority.server()) as server:
        rig = Rig(1, server.port, context=authority.trusting()).open(0).begin(1, 1).arm(1).finish()
    assert [bool(one["flags"] & t.FL_COALESCED) for one in rig.stream(0)] == [True, False, True]
    assert rig.rows[0]["coalesced"] == 2


def test_an_event_of_many_records_and_a_request_of_many(authority: Authority) -> None:
    def script(call: Call) -> None:
        call.finish(answer("x" * 3_000_000, "y"))

    with serve(script, tls=authority.server()) as server:
        rig = Rig(1, server.port, context=authority.trusting()).open(0).begin(1, 1).arm(1, size=4_000_000).finish()
        assert len(server.requests[0].body) >= 3_999_998
    (row,) = rig.rows
    assert row["end"] == t.END_COMPLETE and row["request_bytes"] > 3_999_998 and row["response_bytes"] > 3_000_000
    assert row["sent_done_ns"] > row["sent_ns"]
    assert [one["channel"] for one in rig.stream(0)][:2] == [t.CH_CONTENT] * 2


def forged(record: bytes) -> bytes:
    """The record with a bit turned round."""
    return record[:-1] + bytes([record[-1] ^ 1])


@pytest.mark.parametrize(
    ("breaks", "end", "said"),
    [
        (lambda sock: forged(sock.seal(chunk(event("b")))), t.END_RESET, "TLS: decryption failed"),
        (lambda sock: b"HTTP/1.1 500 oops, no TLS any more\r\n\r\n", t.END_RESET, "TLS: "),
        (lambda sock: sock.end(), t.END_EOF, ""),
    ],
    ids=["a forged record", "plain text", "close_notify"],
)
def test_a_broken_session_costs_its_request(
    authority: Authority, breaks: Callable[[object], bytes], end: int, said: str
) -> None:
    def script(call: Call) -> None:
        call.send(head(), chunk(event("a")))
        if call.seen.ordinal == 0 and call.seen.connection == 0:
            call.sock.plain.sendall(breaks(call.sock))  # type: ignore[attr-defined]
            call.stay()
        call.finish(chunk(FINISH) + chunk(DONE) + LAST_CHUNK)

    with serve(script, tls=authority.server()) as server:
        rig = Rig(1, server.port, context=authority.trusting()).open(0).begin(1, 2).arm(2).finish()
    assert [row["end"] for row in rig.rows] == [end, t.END_COMPLETE]
    assert said in rig.error(0)
    assert [one["channel"] for one in rig.stream(0)] == [t.CH_CONTENT], "what came before is kept"


def test_a_kept_connection_that_was_closed_is_tried_again(authority: Authority) -> None:
    def script(call: Call) -> None:
        call.finish(answer("a"))
        if call.seen.connection == 0:
            call.sock.plain.sendall(call.sock.end())  # type: ignore[attr-defined]
            call.close()

    with serve(script, tls=authority.server()) as server:
        rig = Rig(1, server.port, context=authority.trusting()).open(0).begin(1, 3).arm(3).finish()
        assert server.accepts == 2
    assert [row["end"] for row in rig.rows] == [t.END_COMPLETE] * 3


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["TLS 1.2", "TLS 1.3"])
def test_a_session_is_taken_up_again(authority: Authority, newest: ssl.TLSVersion) -> None:
    with serve(lambda call: call.finish(answer("a")), tls=authority.server(newest=newest)) as server:
        rig = Rig(2, server.port, context=authority.trusting()).open(0).begin(1, 1).arm(1).finish()
        made = rig.connect()
        assert made.tls is not None and made.tls[0].session_reused
        rig.engine.attach(1, made.fd, tls=made.tls)


# ---------------------------------------------------------------- who is there


def test_certificates_are_verified_unless_told_otherwise(authority: Authority) -> None:
    with serve(models, tls=authority.server()) as server:
        url = f"https://localhost:{server.port}"
        with pytest.raises(TargetError, match=r"certificate is not trusted .*--ca-file FILE.*--insecure") as told:
            list_models(url, None, {})
        assert "\n" not in str(told.value)
        assert [one["id"] for one in list_models(url, None, {}, Way(TlsOptions(str(authority.ca_file))))] == ["m"]
        assert [one["id"] for one in list_models(url, None, {}, Way(TlsOptions(insecure=True)))] == ["m"]


def test_a_certificate_of_another_name_is_refused(authority: Authority) -> None:
    with (
        serve(models, tls=authority.server("elsewhere.example")) as server,
        pytest.raises(TargetError, match="not valid for 'localhost'.*give the name the certificate has"),
    ):
        list_models(f"https://localhost:{server.port}", None, {}, Way(TlsOptions(str(authority.ca_file))))


def test_a_client_certificate_is_shown_to_a_server_that_wants_one(authority: Authority) -> None:
    wanting = authority.server()
    wanting.verify_mode = ssl.CERT_REQUIRED
    wanting.load_verify_locations(authority.ca_file)
    cert, key = authority.client_files()
    ca = str(authority.ca_file)
    with serve(models, tls=wanting) as server:
        url = f"https://localhost:{server.port}"
        with pytest.raises(TargetError, match="certificate required.*--client-cert FILE"):
            list_models(url, None, {}, Way(TlsOptions(ca)))
        assert list_models(url, None, {}, Way(TlsOptions(ca, str(cert), str(key))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ca_file": "none.pem"}, "--ca-file none.pem: cannot be read: No such file"),
        ({"ca_file": "text"}, "--ca-file text: holds no certificate"),
        ({"client_cert": "none.pem"}, "--client-cert none.pem: cannot be read"),
        ({"client_cert": "client.pem"}, "--client-cert client.pem: is not in PEM form, or lacks a part"),
        ({"client_cert": "client.pem", "client_key": "text"}, "--client-key text: is not in PEM form"),
        ({"client_cert": "client.pem", "client_key": "other.key"}, "the key is not that of the certificate"),
        ({"client_cert": "client.pem", "client_key": "locked.key"}, "the private key is encrypted"),
    ],
)
def test_files_that_are_no_good_are_named(
    authority: Authority, options: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no certificate\n")
    authority.client_files()
    trustme.CA().issue_cert("other@example.org").private_key_pem.write_to_path("other.key")
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path("client.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"word")
    Path("locked.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    with pytest.raises(PlanError, match=said.replace("(", r"\(")):
        context(TlsOptions(**options))
