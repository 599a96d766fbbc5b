"""Chats answered by OpenAI-compatible servers: several at once, patient with those that stall, drop, or say 429 or 500.

A chat is answered turn by turn. It comes back whole, or with the reason why not.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwright.configs import UserError, reason
from headwright.configs.schema import RegenerateConfig

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
PASSING = (408, 409, 425, 429)  # client errors that pass by themselves; every 5xx does
Turns = list[dict[str, Any]]
Chat = tuple[Any, Sequence[Turns], Any, dict[str, Any]]  # (its name, turns before each answer, tools, sampling)


class Refused(Exception):
    """A server will not answer this, however often it is asked."""


class Exhausted(Exception):
    """Every attempt failed."""


@dataclass
class Server:
    """One URL."""

    url: str
    client: Any
    busy: int = 0
    rest_until: float = 0.0
    answered: int = 0


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
        self.openai, self.settings, self.model = openai, settings, model
        self.gate = Gate(settings.requests_per_minute)
        self.slots = asyncio.Semaphore(settings.concurrency * len(settings.urls))
        self.servers = [
            Server(url, openai.AsyncOpenAI(base_url=url, api_key=key, timeout=settings.timeout, max_retries=0))
            for url in settings.urls
        ]

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
            except Refused:
                if not messages:
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
            async with self.slots:
                await self.gate.wait()
                server = self.choose()
                server.busy += 1
                try:
                    return self.read(await self.request(server, messages, tools, sampling), server)
                except self.openai.APIStatusError as error:
                    why = f"{server.url}: {reason(error)}"
                    if error.status_code < 500 and error.status_code not in PASSING:
                        raise Refused(why) from None
                    wanted = error.response.headers.get("retry-after", "")
                except (self.openai.APIError, ValueError, TypeError, AttributeError, IndexError) as error:
                    why, wanted = f"{server.url}: {type(error).__name__}: {reason(error)}", ""
                finally:
                    server.busy -= 1
            pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
            pause = min(float(wanted), LONGEST_PAUSE) if wanted.replace(".", "", 1).isdigit() else pause
            server.rest_until = time.monotonic() + pause
            if attempt < self.settings.retries:
                await asyncio.sleep(pause)
        raise Exhausted(why)

    def choose(self) -> Server:
        """The least busy server, one that has not just failed if there is any."""
        now = time.monotonic()
        return min(self.servers, key=lambda server: (server.rest_until > now, server.busy, random.random()))

    async def request(self, server: Server, messages: Turns, tools: Any, sampling: dict[str, Any]) -> Any:
        """One request. The time limit holds for all of it, also when a server sends a byte now and then."""
        options = dict(sampling) | ({"tools": tools} if tools else {})
        call = server.client.chat.completions.create(model=self.model, messages=messages, **options)
        try:
            return await asyncio.wait_for(call, self.settings.timeout)
        except asyncio.TimeoutError:
            raise ValueError(f"no answer within {self.settings.timeout:g} s") from None

    def read(self, response: Any, server: Server) -> tuple[dict[str, Any], bool]:
        """The assistant's turn in a response. Raises ValueError for one that says nothing."""
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
        server.answered += 1
        return said, choice.finish_reason == "stop"


def answer_over_servers(
    settings: RegenerateConfig, model: str, key: str, chats: Iterator[Chat]
) -> Iterator[tuple[Any, Turns | None, str]]:
    """(name, messages or None, why not) of every chat, as they are finished.

    Raises UserError when no server has ever answered and many chats have failed.
    """
    loop = asyncio.new_event_loop()
    pending: dict[asyncio.Task[Turns], Any] = {}
    try:
        servers = loop.run_until_complete(open_servers(settings, model, key))
        limit = 2 * settings.concurrency * len(settings.urls)
        failed = 0
        while True:
            while len(pending) < limit and (chat := next(chats, None)) is not None:
                pending[loop.create_task(servers.chat(*chat[1:]))] = chat[0]
            if not pending:
                return
            done, _ = loop.run_until_complete(asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))
            for task in done:
                name = pending.pop(task)
                error = task.exception()
                failed += error is not None
                if isinstance(error, Exhausted):
                    refuse_silence(servers, failed, error)
                if error is not None and not isinstance(error, Refused | Exhausted):
                    raise error
                yield name, None if error else task.result(), str(error or "")
    finally:
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def open_servers(settings: RegenerateConfig, model: str, key: str) -> Servers:
    """Servers, made inside their loop."""
    return Servers(settings, model, key)


def refuse_silence(servers: Servers, failed: int, error: Exception) -> None:
    """Do not go through a whole corpus when nobody is there."""
    if failed >= 8 and not any(server.answered for server in servers.servers):
        raise UserError(f"regenerate: no server has answered yet, {failed} chats failed; the last reason: {error}")
