"""Questions over a Unix socket: many threads, errors, and who may ask."""

from __future__ import annotations

import asyncio
import pickle
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flowtrain.actors.questions import Asker, FailedQuestion, QuestionServer
from flowtrain.types.memory import SocketOffer
from tests.actors.elsewhere import Elsewhere

LIMIT_S = 30.0


class Odd(Exception):
    """Can be packed, but not made again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Actor:
    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.may_answer = asyncio.Event()
        self.server = QuestionServer(self.answer)

    async def answer(self, question: bytes) -> bytes:
        self.asked.append(question)
        if question == b"wait":
            await self.may_answer.wait()
        if question == b"fail":
            raise ValueError("wrong")
        if question == b"odd":
            raise Odd(1, 2)
        return question * 2


@pytest.fixture
def actor() -> Iterator[Elsewhere[Actor]]:
    with Elsewhere(Actor()) as running:
        yield running


@pytest.fixture
def offer(actor: Elsewhere[Actor]) -> SocketOffer:
    found: SocketOffer = actor.call(actor.actor.server.open())
    assert actor.call(actor.actor.server.open()) == found, "it listens once"
    return found


def test_threads_get_their_own_answers(offer: SocketOffer) -> None:
    asker = Asker(offer, LIMIT_S)
    questions = [b"%d" % number * (1 + 50_000 * (number % 3)) for number in range(60)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(asker.ask, questions)) == [each * 2 for each in questions]


def test_a_long_wait_of_one_thread_holds_up_no_other(actor: Elsewhere[Actor], offer: SocketOffer) -> None:
    asker = Asker(offer, LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asker.ask, b"wait")
        assert asker.ask(b"now") == b"nownow"
        assert not waiting.done()
        actor.call(released(actor.actor))
        assert waiting.result(LIMIT_S) == b"waitwait"


async def released(actor: Actor) -> None:
    actor.may_answer.set()


def test_errors_arrive_with_their_traceback(offer: SocketOffer) -> None:
    asker = Asker(offer, LIMIT_S)
    with pytest.raises(FailedQuestion) as caught:
        asker.ask(b"fail")
    assert isinstance(caught.value.error, ValueError) and "in answer" in caught.value.traceback
    with pytest.raises(FailedQuestion) as caught:
        asker.ask(b"odd")
    assert isinstance(caught.value.error, RuntimeError) and "1 and 2" in str(caught.value.error)
    assert asker.ask(b"on") == b"onon", "the connection goes on"


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(actor: Elsewhere[Actor], offer: SocketOffer) -> None:
    asker = Asker(offer, 0.2)
    with pytest.raises(TimeoutError):
        asker.ask(b"wait")
    actor.call(released(actor.actor))
    asker._timeout_s = LIMIT_S
    assert asker.ask(b"next") == b"nextnext"


def test_who_lacks_the_token_is_not_heard(actor: Elsewhere[Actor], offer: SocketOffer) -> None:
    stranger = Asker(replace(offer, token=bytes(len(offer.token))), LIMIT_S)
    with pytest.raises((EOFError, ConnectionError)):
        stranger.ask(pickle.dumps("a question"))
    assert actor.actor.asked == []


def test_a_socket_that_is_not_there_is_an_error_at_once(offer: SocketOffer) -> None:
    with pytest.raises(OSError):
        Asker(replace(offer, name="flowtrain-nobody"), LIMIT_S)


def test_a_length_that_no_question_has_ends_the_connection(offer: SocketOffer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(LIMIT_S)
        connection.connect(f"\0{offer.name}")
        connection.sendall(offer.token + b"\0" + b"\xff" * 8)
        assert connection.recv(1) == b""


def test_every_thread_of_a_node_may_connect(actor: Elsewhere[Actor]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        actor.call(actor.actor.server.open())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_end_of_the_other_process_ends_a_wait(offer: SocketOffer, actor: Elsewhere[Actor]) -> None:
    asker = Asker(offer, LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asker.ask, b"wait")
        while b"wait" not in actor.actor.asked:
            pass
        actor.end()
        with pytest.raises((EOFError, ConnectionError)):
            waiting.result(LIMIT_S)
