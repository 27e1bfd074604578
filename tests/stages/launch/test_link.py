"""A connection between driver and agent: both prove the secret, and silence is noticed."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from rlhf_pipeline.errors import StageError
from rlhf_pipeline.stages.launch.link import Link


@pytest.fixture
def sockets():
    """Two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    yield one, other
    for each in (one, other):
        with suppress(OSError):
            each.close()


def joined(sockets, tokens=("secret", "secret"), timeouts_s=(30.0, 30.0)):
    """The links of driver and agent, or what they raised."""
    found = [None, None]

    def make(side):
        try:
            found[side] = Link(
                sockets[side], tokens[side], driver=side == 0, timeout_s=timeouts_s[side]
            )
        except StageError as error:
            found[side] = error

    threads = [threading.Thread(target=make, args=(side,)) for side in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_objects_and_pieces_arrive_in_order(sockets):
    driver, agent = joined(sockets)
    driver.send("file", path="a")
    driver.send_piece(b"\0" * 2**20)
    driver.send("signal", rank=1)
    assert agent.expect("file") == {"kind": "file", "path": "a"}
    assert agent.receive_piece() == b"\0" * 2**20
    assert agent.receive(5.0) == {"kind": "signal", "rank": 1}
    assert agent.receive(0) is None and agent.lost is None
    driver.close()
    agent.close()


def test_another_secret_is_refused_by_both(sockets):
    for error in joined(sockets, ("secret", "guess")):
        assert isinstance(error, StageError)
        assert str(error).startswith("RLHF_NODE_TOKEN: the other side of the connection has")


def test_a_proof_of_the_other_side_cannot_be_sent_back(sockets):
    """A stranger that repeats what the driver sends learns nothing and proves nothing."""
    stranger = sockets[1]

    def echo():
        with suppress(OSError):
            while content := stranger.recv(2**16):
                stranger.sendall(content)

    threading.Thread(target=echo, daemon=True).start()
    with pytest.raises(StageError, match="another secret"):
        Link(sockets[0], "secret", driver=True, timeout_s=30.0)


def test_another_protocol_is_refused(sockets):
    sockets[1].sendall(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" + bytes(2**17))
    with pytest.raises(StageError, match="speaks another protocol"):
        Link(sockets[0], "secret", driver=True, timeout_s=30.0)


def test_a_fault_is_the_reason_of_the_end(sockets):
    """Also for a side that was sending and did not read it yet."""
    driver, agent = joined(sockets)
    agent.send("fault", reason="No space left on device: '/data'")
    agent.close()
    with pytest.raises(OSError, match=r".*"):
        for _ in range(1000):
            driver.send_piece(bytes(2**16))
    assert driver.lost == "No space left on device: '/data'"


def test_a_closed_connection_is_noticed_at_once(sockets):
    driver, agent = joined(sockets)
    agent.close()
    with pytest.raises(StageError, match="the connection was closed"):
        driver.expect("report")
    with pytest.raises(OSError, match=r".*"):
        for _ in range(1000):
            driver.send("ping")


def test_a_silent_side_is_noticed_in_time(sockets, monkeypatch):
    """A machine that vanished sends neither pulses nor the end of the connection."""
    monkeypatch.setattr(Link, "_beat", lambda link: None)
    driver, agent = joined(sockets, timeouts_s=(1.0, 30.0))
    start = time.monotonic()
    with pytest.raises(StageError, match="silent for 1 s"):
        driver.expect("report")
    assert time.monotonic() - start >= 0.9
    agent.close()


def test_pulses_keep_an_idle_connection(sockets):
    driver, agent = joined(sockets, timeouts_s=(1.0, 1.0))
    time.sleep(2.5)
    assert driver.lost is None and agent.lost is None
    driver.close()
    agent.close()
