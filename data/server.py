"""Chats answered by OpenAI-compatible servers: several at once, patient with those that stall, drop, or say 429 or 500.

A chat is answered turn by turn. It comes back whole, or with the reason why not.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwright.configs import UserError, reason
from headwright.configs.schema import RegenerateConfig
from headwright.data.chat import clean

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
PASSING = (408, 409, 425, 429)  # client errors that pass by themselves; every 5xx does
TOO_MUCH = (400, 413, 422)  # what a server says when a chat has grown too long for it
SILENCE = 8  # chats in a row without any answer: nobody is there
Turns = list[dict[str, Any]]
Chat = tuple[Any, Sequence[Turns], Any, dict[str, Any]]  # (its name, turns before each answer, tools, sampling)


class Refused(Exception):
    """A server will not answer this, however often it is asked."""

    def __init__(self, why: str, status: int):
        super().__init__(why)
        self.status = status


class Exhausted(Exception):
    """Every attempt failed."""


@dataclass
class Server:
    """One URL."""

    url: str
    client: Any
    slots: asyncio.Semaphore
    busy: int = 0
    rest_until: float = 0.0


@dataclass
class Gate:
    """At most so many requests a minute, evenly spaced."""

    per_minute: int | None
    next: float = field(default_factory=time.monotonic)

    async def wait(self) -> None:
        """Until the next request may go."""
        if self.per_minute is None:
            return
        now = time.monotonic()
        self.next = max(self.next, now) + 60 / self.per_minute
        await asyncio.sleep(max(0.0, self.next - 60 / self.per_minute - now))


class Servers:
    """All servers of one regeneration."""

    def __init__(self, settings: RegenerateConfig, model: str, key: str):
        try:
            import openai
        except ImportError:
            raise UserError("regenerate.urls needs a package: pip install openai") from None
        self.openai, self.settings, self.model, self.key = openai, settings, model, key
        self.gate = Gate(settings.requests_per_minute)
        self.servers = [self.open(url) for url in settings.urls]

    def open(self, url: str) -> Server:
        """One server's client. It retries nothing itself."""
        client = self.openai.AsyncOpenAI(base_url=url, api_key=self.key, timeout=self.settings.timeout, max_retries=0)
        return Server(url, client, asyncio.Semaphore(self.settings.concurrency))

    async def close(self) -> None:
        """Close connections."""
        for server in self.servers:
            await server.client.close()

    async def chat(self, rounds: Sequence[Turns], tools: Any, sampling: dict[str, Any]) -> Turns:
        """All turns of a chat, answered. What a server refuses after the first answer (too long, say) ends the chat."""
        messages: Turns = []
        for turns in rounds:
            try:
                said, whole = await self.ask([*messages, *turns], tools, sampling)
            except Refused as error:
                if not messages or error.status not in TOO_MUCH:
                    raise
                break
            messages += [*turns, said]
            if not whole:
                break
        return messages

    async def ask(self, messages: Turns, tools: Any, sampling: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """One answer, and whether it ended by itself."""
        why = "no attempt"
        for attempt in range(self.settings.retries + 1):
            server = self.choose()
            server.busy += 1
            wanted = None
            try:
                async with server.slots:
                    await self.gate.wait()
                    return read_answer(await self.request(server, messages, tools, sampling))
            except self.openai.APIStatusError as error:
                why = self.hide_key(f"{server.url}: {reason(error)}")
                if error.status_code < 500 and error.status_code not in PASSING:
                    raise Refused(why, error.status_code) from None
                wanted = error.response.headers.get("retry-after")
            except (self.openai.APIError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
                why = self.hide_key(f"{server.url}: {type(error).__name__}: {reason(error)}")
            finally:
                server.busy -= 1
            pause = pause_after(attempt, wanted)
            server.rest_until = time.monotonic() + pause
            if attempt < self.settings.retries:
                await asyncio.sleep(pause)
        raise Exhausted(why)

    def hide_key(self, why: str) -> str:
        """Servers repeat what they were sent."""
        return why.replace(self.key, "***")

    def choose(self) -> Server:
        """The least busy server, one that has not just failed if there is any."""
        now = time.monotonic()
        return min(self.servers, key=lambda server: (server.rest_until > now, server.busy, random.random()))

    async def request(self, server: Server, messages: Turns, tools: Any, sampling: dict[str, Any]) -> Any:
        """One request. The time limit holds for all of it, also when a server sends a byte now and then."""
        options = dict(sampling) | ({"tools": tools} if tools else {})
        sent = [on_the_wire(turn) for turn in messages]
        call = server.client.chat.completions.create(model=self.model, messages=sent, **options)
        try:
            return await asyncio.wait_for(call, self.settings.timeout)
        except asyncio.TimeoutError:
            raise ValueError(f"no answer within {self.settings.timeout:g} s") from None


def pause_after(attempt: int, wanted: str | None) -> float:
    """Seconds before the next attempt: what the server asks for, or longer each time; never very long."""
    try:
        return min(max(float(wanted or ""), 0.0), LONGEST_PAUSE)
    except ValueError:
        return min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)


def on_the_wire(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn as the protocol has it: the arguments of tool calls are text, and calls have ids."""
    if not turn.get("tool_calls"):
        return turn
    calls = [
        {"id": f"call_{number}", **call, "function": call["function"] | {"arguments": as_text(call["function"])}}
        for number, call in enumerate(turn["tool_calls"])
    ]
    return turn | {"tool_calls": calls}


def as_text(function: dict[str, Any]) -> str:
    """The arguments of a call as JSON."""
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read_answer(response: Any) -> tuple[dict[str, Any], bool]:
    """The assistant's turn in a response, and whether the chat can go on. Raises ValueError for one that says nothing."""
    choice = response.choices[0]
    message = choice.message
    said: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    thoughts = (message.model_extra or {}).get("reasoning_content") or (message.model_extra or {}).get("reasoning")
    if thoughts:
        said["reasoning_content"] = thoughts
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    if not (said["content"].strip() or message.tool_calls):
        raise ValueError("an empty answer")
    clean(json.dumps(said, ensure_ascii=False))
    return said, choice.finish_reason != "length" and not message.tool_calls


def answer_over_servers(
    settings: RegenerateConfig, model: str, key: str, chats: Iterator[Chat]
) -> Iterator[tuple[Any, Turns | None, str]]:
    """(name, messages or None, why not) of every chat, as they are finished.

    Raises UserError when many chats in a row have failed.
    """
    loop = asyncio.new_event_loop()
    pending: dict[asyncio.Task[Turns], Any] = {}
    servers = None
    try:
        servers = loop.run_until_complete(open_servers(settings, model, key))
        limit = 2 * settings.concurrency * len(settings.urls)
        failed = 0  # in a row
        while True:
            while len(pending) < limit and (chat := next(chats, None)) is not None:
                pending[loop.create_task(servers.chat(*chat[1:]))] = chat[0]
            if not pending:
                break
            done, _ = loop.run_until_complete(asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))
            for task in done:
                name = pending.pop(task)
                error = task.exception()
                if error is not None and not isinstance(error, Refused | Exhausted):
                    raise error
                failed = 0 if error is None else failed + silent(error)
                yield name, None if error else task.result(), str(error or "")
                if failed >= SILENCE:
                    raise no_answer(failed, error)
    finally:
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending))
        if servers is not None:
            loop.run_until_complete(servers.close())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def open_servers(settings: RegenerateConfig, model: str, key: str) -> Servers:
    """Servers, made inside their loop."""
    return Servers(settings, model, key)


def silent(error: BaseException) -> bool:
    """Whether a failure says that nothing can be had there; a single chat may be too long, or not wanted."""
    return isinstance(error, Exhausted) or (isinstance(error, Refused) and error.status not in TOO_MUCH)


def no_answer(failed: int, error: BaseException | None) -> UserError:
    """Do not go through a whole corpus when nobody is there."""
    return UserError(f"regenerate: {failed} chats in a row got no answer; the last reason: {error}")
