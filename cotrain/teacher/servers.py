"""Several servers of one target, used as one: a request goes to a server that is well."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from itertools import count
from typing import Any, TypeVar
from urllib.error import HTTPError

from cotrain.errors import UserError
from inference.sampling import Sampling
from inference.servers.hidden_states import NoStates, StatesClient, WrongStates
from inference.servers.openai_client import Completion

Item = TypeVar("Item")
Result = TypeVar("Result")
PATIENCE = 600.0  # seconds in which some server must answer
TIMEOUT = 120.0  # seconds in which a server must answer a request for states
SLOWEST = 0.5  # further seconds for each new token of a text: many texts are sampled at once
PAUSE = 1.0  # seconds between requests while no server is well
DOWN = 10.0  # seconds in which a server that failed is not asked if another one is well; twice as long each next time
LONGEST_DOWN = 640.0
REJECTED = (400, 401, 403, 404, 413, 422)  # answers that asking again does not change
APART = 0.1  # of the states' mean size: more than kernels and dtypes explain
TRIES = 3  # of a text whose states came back wrong
closed = threading.Event()  # set when no request of the present run is repeated any more; outside of runs, never


@contextmanager
def open_servers() -> Iterator[None]:
    """Let requests of `Servers` that are made in the block be repeated until it ends. Afterwards threads that wait for
    a server give up, so that the process can end."""
    global closed
    before, closed = closed, threading.Event()
    ends = closed
    try:
        yield
    finally:
        ends.set()
        closed = before


class Servers:
    """Sends each request to the next server that is well. If a server fails, the request goes to another one, or is
    repeated after a pause.

    Raises UserError if no server answers for PATIENCE seconds, if one rejects a request or gives no states, or if
    states come back wrong TRIES times; the same command then resumes the run.

    clients: one per server. at_once: requests that run at a time, per server.
    """

    def __init__(self, clients: Sequence[StatesClient], at_once: int = 8) -> None:
        self.clients, self.turns = clients, count()
        self.well_at = [0.0] * len(clients)  # when each may be asked again
        self.failures = [0] * len(clients)  # of each, since its last answer
        self.closed = closed
        self.rows = at_once * len(clients)
        self.pool = ThreadPoolExecutor(self.rows)

    @property
    def sends_ids(self) -> bool:
        """Return whether all servers send token ids."""
        return all(client.sends_ids for client in self.clients)

    def map(self, ask: Callable[[StatesClient, Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return ask(client, item) for each item, in order; they run at the same time."""
        return list(self.pool.map(lambda item: self.call(lambda client: ask(client, item)), items))

    def call(self, ask: Callable[[StatesClient], Result]) -> Result:
        """Return ask(client) of a server that is well."""
        end, wrong = time.monotonic() + PATIENCE, 0
        while not self.closed.is_set():
            number = self._next()
            try:
                answer = ask(self.clients[number])
                self.failures[number] = 0
                return answer
            except ConnectionError as error:
                rejected = isinstance(error.__cause__, HTTPError) and error.__cause__.code in REJECTED
                if rejected or time.monotonic() > end:
                    raise UserError(f"teacher.url: {error}; start the same command again to resume") from error
                self.well_at[number] = time.monotonic() + min(DOWN * 2 ** self.failures[number], LONGEST_DOWN)
                self.failures[number] += 1
            except NoStates as error:
                raise UserError(f"teacher.url: {error}") from error
            except WrongStates as error:
                wrong += 1
                if wrong == TRIES:
                    raise UserError(f"teacher.url: {error}") from error
            if min(self.well_at) > time.monotonic():
                self.closed.wait(PAUSE)
        raise UserError("teacher.url: the run has ended")

    def _next(self) -> int:
        """Return the number of the next server that is well, or else of the one that failed first."""
        first, now = next(self.turns), time.monotonic()
        some = [(first + i) % len(self.clients) for i in range(len(self.clients))]
        return next((number for number in some if self.well_at[number] <= now), min(some, key=self.well_at.__getitem__))

    def complete(
        self, prompts: Sequence[Any], max_new_tokens: int, sampling: Sampling, seeds: Iterable[int], **_: Any
    ) -> list[Completion]:
        """Return a completion of every prompt, as `Client.complete` does. seeds: one per prompt."""

        def one(client: StatesClient, item: tuple[Any, int]) -> Completion:
            patient = copy(client)
            patient.timeout = TIMEOUT + SLOWEST * max_new_tokens
            return patient.complete([item[0]], max_new_tokens, sampling, [item[1]], at_once=1)[0]

        return self.map(one, zip(prompts, seeds, strict=True))


def servers_at(urls: Sequence[str], layers: Sequence[int], at_once: int = 8) -> Servers:
    """Return the servers at `urls`. layers: those whose states they must write, in order. at_once: see `Servers`.
    Raises UserError naming teacher.url if one does not answer."""
    try:
        return Servers([StatesClient(url, layers, timeout=TIMEOUT) for url in urls], at_once)
    except ConnectionError as error:
        raise UserError(f"teacher.url: {error}: start the server, or leave it out of teacher.url=") from error


def require_states(urls: Sequence[str], layers: Sequence[int], width: int) -> None:
    """Raise UserError naming teacher.url unless every server gives the states of `layers` for a short text, of this
    width, and nearly those of the first server."""
    first = None
    for url in urls:
        try:
            states = StatesClient(url, layers, timeout=TIMEOUT).states([*range(1, 9)]).double()
        except (ConnectionError, ValueError) as error:
            raise UserError(f"teacher.url: {error}") from error
        if states.shape[2] != width:
            raise UserError(f"teacher.url: {url} has states of width {states.shape[2]}, target.path= of {width}")
        first = states if first is None else first
        if (apart := float((states - first).abs().mean() / first.abs().mean())) > APART:
            raise UserError(
                f"teacher.url: {url} and {urls[0]} give other states of one text, by {apart:.2f} of their size: start "
                "both with one model"
            )
