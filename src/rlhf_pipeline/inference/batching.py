"""Answer requests that arrive at any time: those that wait are answered as one batch."""

import asyncio
import logging
import queue
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from threading import Thread

from rlhf_pipeline.inference.policy import Answer, Finish, write

Piece = tuple[str, Finish | None] | Exception
"""The next text of an answer, and whether it is the last; or why there is no more."""


class Batcher:
    """One thread that writes the answers of all requests, at most `size` at a time.

    A request that arrives while a batch is written waits for its end. Each answer of the batch is
    sent token by token.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: queue.SimpleQueue[tuple[Answer, Callable[[Piece], None]]]
        self._waiting = queue.SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    async def pieces(self, answer: Answer) -> AsyncGenerator[tuple[str, Finish | None]]:
        """The text of an answer as it is written. Whoever stops reading ends the answer."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def send(piece: Piece) -> None:
            with suppress(RuntimeError):  # the loop was closed: the server has ended
                loop.call_soon_threadsafe(arrived.put_nowait, piece)

        self._waiting.put((answer, send))
        try:
            while True:
                piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece[1] is not None:
                    return
        finally:
            answer.finish = answer.finish or "cancelled"

    def _work(self) -> None:
        while True:
            batch = [self._waiting.get()]
            with suppress(queue.Empty):
                while len(batch) < self._size:
                    batch.append(self._waiting.get_nowait())
            readers = {answer: send for answer, send in batch if answer.finish is None}
            try:
                for answer, text in write(list(readers)) if readers else ():
                    readers[answer]((text, answer.finish))
            except Exception as error:  # such as too little memory; the next batch may fit
                logging.getLogger(__name__).exception("a batch of %d failed", len(readers))
                for send in readers.values():
                    send(error)
