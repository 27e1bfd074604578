"""The server of the page, over real HTTP."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlhf_pipeline.labelling.votes import read_votes


def request(address, body=None, **headers):
    """The status and the answer of a GET request, or of a POST request with a JSON body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    try:
        asked = urllib.request.Request(address, data, headers)
        with urllib.request.urlopen(asked, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def state(address, annotator="Ann"):
    status, found = request(f"{address}/state?annotator={annotator}")
    assert status == 200
    return found


def vote(address, pair, choice="a", annotator="Ann", headers=(), **fields):
    body = {"annotator": annotator, "pair": pair, "choice": choice} | fields
    return request(f"{address}/vote", body, **dict(headers))


def test_the_next_pair_hides_who_gave_which_answer(pairs, votes, serve):
    (pair,) = pairs([{"prompt": "Q?", "first": "a", "second": "b", "policies": ["sft", "ppo"]}])
    found = state(serve([pair], votes))
    assert sorted(found["pair"].pop("answers")) == ["a", "b"]
    shown = {"id": pair.pair, "prompt": [{"role": "user", "content": "Q?"}]}
    assert found == {"done": 0, "of": 1, "last": [], "pair": shown}


def test_the_order_is_random_and_that_of_annotator_and_pair(pairs, votes, serve):
    """60 pairs: a fair coin gives fewer than 15 or more than 45 of one side in 1 of 15,000."""
    address, shown = serve(pairs(60), votes), {}
    for annotator in ("Ann", "Bob"):
        firsts = []
        while pair := state(address, annotator)["pair"]:
            firsts.append(pair["answers"][0].startswith("One"))
            assert state(address, annotator)["pair"] == pair
            assert vote(address, pair["id"], "tie", annotator)[0] == 200
        assert len(firsts) == 60 and 15 <= sum(firsts) <= 45
        shown[annotator] = firsts
    assert shown["Ann"] != shown["Bob"]
    for given in read_votes(votes):
        number = int(given.first.removeprefix("One ").removesuffix("."))
        assert given.shown_as_a == ("first" if shown[given.annotator][number] else "second")


@pytest.mark.parametrize(
    ("choice", "scores"), [("a", (1, 0)), ("b", (0, 1)), ("tie", (1, 1)), ("bad", (0, 0))]
)
def test_a_choice_goes_to_the_answer_that_was_shown(pairs, votes, serve, choice, scores):
    address = serve(pairs(12), votes)
    for _ in range(12):
        pair = state(address)["pair"]
        assert vote(address, pair["id"], choice, reason=" short ")[0] == 200
        last = read_votes(votes)[-1]
        by_answer = {last.first: last.first_score, last.second: last.second_score}
        assert tuple(by_answer[answer] for answer in pair["answers"]) == scores
    assert {(v.shown_as_a, v.reason) for v in read_votes(votes)} == {
        ("first", "short"), ("second", "short"),
    }  # fmt: skip


def test_another_server_goes_on_where_the_annotator_was(pairs, votes, serve):
    given = pairs(3)
    first = serve(given, votes)
    assert vote(first, given[0].pair)[1]["pair"]["id"] == given[1].pair
    again = serve(given, votes)
    found = state(again, "%20Ann%20")  # names have no blanks around
    assert (found["done"], found["of"]) == (1, 3)
    assert found["pair"]["id"] == given[1].pair and found["last"] == [given[0].pair]
    assert state(first, "Bob")["done"] == 0
    for _ in range(2):  # however often it is repeated
        assert vote(again, given[0].pair, "undo")[1]["done"] == 0
    status, answer = vote(again, "a pair of another evaluation")
    assert status == 404 and "reload the page" in answer
    assert read_votes(votes) == []


@pytest.mark.parametrize("servers", [1, 2])
def test_two_annotators_at_once_lose_no_vote(pairs, votes, serve, servers):
    given = pairs(50)
    addresses = [serve(given, votes) for _ in range(servers)]

    def annotate(annotator, address):
        return [vote(address, pair.pair, "tie", annotator)[0] for pair in given]

    with ThreadPoolExecutor(2) as threads:
        ann, bob = threads.map(annotate, ("Ann", "Bob"), (addresses[0], addresses[-1]))
    assert ann == bob == [200] * 50
    found = {(v.annotator, v.pair) for v in read_votes(votes)}
    assert found == {(name, pair.pair) for name in ("Ann", "Bob") for pair in given}
    assert votes.read_bytes().count(b"\n") == 100


def test_pages_of_other_origins_and_other_host_names_are_refused(pairs, votes, serve):
    (pair,) = pairs(1)
    address = serve([pair], votes)
    port = address.rpartition(":")[2]
    for origin in ("http://evil.example", "null", "http://127.0.0.1", f"http://localhost:{port}"):
        status, answer = vote(address, pair.pair, headers={"Origin": origin})
        assert status == 403 and "another origin" in answer, origin
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    assert vote(address, pair.pair, headers=rebound) == (400, "Invalid host header")
    assert request(f"{address}/state?annotator=Ann", **rebound)[0] == 400
    form = {"Content-Type": "text/plain"}  # what a page can send to any address without asking
    assert vote(address, pair.pair, headers=form)[0] == 422
    assert read_votes(votes) == []
    assert vote(address, pair.pair, headers={"Origin": address})[0] == 200


@pytest.mark.parametrize(
    "change", [{"choice": "c"}, {"annotator": " "}, {"annotator": "a" * 65}, {"reason": "a" * 2001}]
)
def test_a_request_that_the_page_would_not_send_writes_nothing(pairs, votes, serve, change):
    (pair,) = pairs(1)
    address = serve([pair], votes)
    assert vote(address, pair.pair, **change)[0] == 422
    assert vote(address, pair.pair, **change | {"reason": "a" * 2**17})[0] == 413
    assert read_votes(votes) == []


def test_a_full_disk_is_a_message_on_the_page_and_the_vote_comes_again(serve, pairs, disk):
    file = disk.path / "votes.jsonl"
    file.touch()
    (pair,) = pairs(1)
    address = serve([pair], file)
    disk.leave(0)
    status, refused = vote(address, pair.pair)
    assert status == 507
    assert f"{file}: found No space left on device. Fix: make room there" in refused
    assert file.read_text() == ""
    disk.make_room()
    assert vote(address, pair.pair)[1]["done"] == 1
