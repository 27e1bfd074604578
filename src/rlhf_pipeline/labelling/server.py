"""The server of the page on which people compare answers; all state is in the file of votes."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, StringConstraints
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rlhf_pipeline.data.records import key
from rlhf_pipeline.labelling.votes import Pair, Vote, add_vote, as_read, read_votes, remove_vote
from rlhf_pipeline.verdict.answers import judge_title
from rlhf_pipeline.verdict.statistics import rate_interval, win_rate

Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=64)]

SCORES = {"a": (1, 0), "b": (0, 1), "tie": (1, 1), "bad": (0, 0)}
"""Scores of the answers that are shown as A and B, by what a person chose."""


class Choice(BaseModel):
    """What an annotator does with a pair."""

    annotator: Name
    pair: str
    choice: Literal["a", "b", "tie", "bad", "undo"]
    reason: Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)] = ""


def application(pairs: Sequence[Pair], file: Path, host: str) -> FastAPI:
    """The page and its requests; only `host` and this machine are answered (DNS rebinding)."""
    by_id = {pair.pair: pair for pair in pairs}
    app = FastAPI(openapi_url=None)
    app.middleware("http")(check_origin)
    hosts = ["127.0.0.1", "localhost", host]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=2**16)

    @app.get("/state")
    def state(annotator: Name) -> dict[str, Any]:
        """The next pair of an annotator, which hides the policies; all meet pairs in one order."""
        own = (vote.pair for vote in read_votes(file) if vote.annotator == annotator)
        done = {pair: by_id[pair] for pair in own if pair in by_id}
        coming = next((pair for pair in pairs if pair.pair not in done), None)
        shown = coming and {
            "id": coming.pair,
            "prompt": as_read(coming.prompt),
            "answers": (coming.first, coming.second)[:: order(coming, annotator)],
        }
        return {"done": len(done), "of": len(pairs), "last": [*done][-1:], "pair": shown}

    @app.post("/vote")
    def vote(given: Choice) -> dict[str, Any]:
        """Write or undo a vote, then send the next pair."""
        pair = by_id.get(given.pair)
        if pair is None:
            raise HTTPException(404, "the server has other pairs now: reload the page")
        if given.choice == "undo":
            remove_vote(file, given.annotator, given.pair)
        else:
            step = order(pair, given.annotator)
            first_score, second_score = SCORES[given.choice][::step]
            line = {
                "first_score": first_score,
                "second_score": second_score,
                "shown_as_a": ("first", "second")[::step][0],
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            add_vote(file, Vote(**dict(pair) | dict(given) | line))
        return state(given.annotator)

    @app.exception_handler(OSError)
    async def not_written(_: Request, error: OSError) -> Response:
        detail = f"{file}: found {error.strerror}. Fix: make room there, or let this server write"
        return JSONResponse({"detail": detail}, 507)

    @app.get("/results")
    def show_results() -> list[tuple[str, str]]:
        return results(pairs, read_votes(file))

    app.mount("/", StaticFiles(directory=Path(__file__).parent / "page", html=True))
    return app


async def check_origin(
    request: Request, answer: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answer a request, unless a page of another origin sent it; its body is not read before."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
        return JSONResponse({"detail": "the request came from a page of another origin"}, 403)
    return await answer(request)


def order(pair: Pair, annotator: str) -> int:
    """1 if A is the first answer, -1 if it is the second: by chance, but every time the same."""
    return 1 if key(annotator, pair.pair)[0] % 2 else -1


def results(pairs: Sequence[Pair], votes: Sequence[Vote]) -> list[tuple[str, str]]:
    """The name and the text of each result. Votes on other pairs do not count.

    All votes on a pair count as one, by their mean: intervals need independent pairs.
    """
    given: dict[str, list[Vote]] = {pair.pair: [] for pair in pairs}
    for vote in votes:
        given.get(vote.pair, []).append(vote)
    found: list[tuple[str, str]] = []
    for policies in dict.fromkeys(pair.policies for pair in pairs):
        voted = [pair for pair in pairs if given[pair.pair] and pair.policies == policies]
        gains = [float(sum(v.second_score - v.first_score for v in given[p.pair])) for p in voted]
        if gains:
            rate = win_rate(gains, [0.0] * len(gains))
            text = _share(rate.wins + rate.ties / 2, rate.n, rate.ties)
            counts = f"wins {rate.wins}, ties {rate.ties}, losses {rate.losses}"
            found.append((f"People prefer {policies[1]} to {policies[0]}", f"{text}: {counts}"))
        for judge in voted[0].judges if voted else ():
            signs = [gain * pair.judges[judge] for gain, pair in zip(gains, voted, strict=True)]
            if n := sum(sign != 0 for sign in signs):
                text = f"{_share(sum(sign > 0 for sign in signs), n)} without ties"
                found.append((f"People agree with {judge_title(judge)}", text))
    choices = [[(v.first_score, v.second_score) for v in group] for group in given.values()]
    if agreed := [one == other for group in choices for one, other in combinations(group, 2)]:
        share = sum(agreed) / len(agreed)
        found.append(("Two people agree", f"on {share:.1%} of the pairs that both compared"))
    counted = Counter(vote.annotator for group in given.values() for vote in group)
    return found + [(name, f"{count} of {len(pairs)} pairs") for name, count in counted.items()]


def _share(count: float, n: int, ties: int = 0) -> str:
    lower, upper = rate_interval(count / n, n, ties)
    return f"on {count / n:.1%} (95%: {lower:.1%} to {upper:.1%}) of {n} pairs"
