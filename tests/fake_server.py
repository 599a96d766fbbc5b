"""A local OpenAI-compatible server that misbehaves as it is told, and notes everything that it was sent."""

import contextlib
import hashlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = (
    "stall",
    "drop",
    "hang up",
    "429",
    "429 later",
    "429 date",
    "500",
    "503",
    "broken",
    "html",
    "no choices",
    "null choices",
    "error in 200",
    "empty",
    "blank",
    "trickle",
)


def answer_to(messages: list[dict[str, Any]]) -> str:
    """What the server says: a function of all that it was told, so that a whole chat can be checked afterwards."""
    return "said " + hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:12]


def assert_conditioned(messages: list[dict[str, Any]], answers: int | None = None) -> None:
    """Every answer of a chat was given to exactly the turns before it."""
    places = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    assert places
    assert places[-1] == len(messages) - 1
    assert answers is None or len(places) == answers
    for place in places:
        assert messages[place] == {"role": "assistant", "content": answer_to(messages[:place])}


class FakeServer(ThreadingHTTPServer):
    """`fault(number, body)`: what goes wrong with a request, if anything. `reply(body)`: changes of the usual choice."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None,
        reply: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {},
        think: float = 0.0,
    ):
        self.fault, self.reply, self.think = fault, reply, think
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.message = "no"
        self.busy = self.busiest = self.open = 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are what the tests are about."""

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """The usual answer."""
        message = {"role": "assistant", "content": answer_to(body["messages"])}
        return {"index": 0, "finish_reason": "stop", "message": message} | self.reply(body)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: FakeServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.server.lock:
            self.server.open += 1

    def finish(self) -> None:
        with self.server.lock:
            self.server.open -= 1
        super().finish()

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.server
        with fake.lock:
            number = len(fake.bodies)
            fake.bodies.append(body | {"path": self.path})
            fake.headers.append({name.lower(): value for name, value in self.headers.items()})
            fake.times.append(time.monotonic())
            fake.busy += 1
            fake.busiest = max(fake.busiest, fake.busy)
        try:
            time.sleep(fake.think)
            fault = fake.fault(number, body)
            if fault in ("stall", "trickle"):
                self.linger(trickle=fault == "trickle")
        finally:
            with fake.lock:  # before the last byte is sent: the client may then ask again
                fake.busy -= 1
        if fault not in ("stall", "trickle"):
            self.answer(fault, body)

    def linger(self, trickle: bool) -> None:
        """Say nothing, or a blank now and then, until the client is gone."""
        self.close_connection = True
        if trickle:
            self.head(200, 10**6)
        for _ in range(300):
            if select.select([self.connection], [], [], 0.01)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                return
            if trickle:
                self.wfile.write(b" ")

    def head(self, status: int, length: int, kind: str = "application/json", **headers: str) -> None:
        """Status and headers."""
        self.send_response(status)
        for name, value in ({"Content-Type": kind, "Content-Length": str(length)} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def answer(self, fault: str | None, body: dict[str, Any]) -> None:
        """A response, good or bad."""
        choice = self.server.choice(body)
        whole = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
        if fault == "hang up":
            self.close_connection = True
        elif fault == "drop":
            self.head(200, len(whole))
            self.wfile.write(whole[: len(whole) // 2].encode())
            self.close_connection = True
        elif fault and fault[:3].isdigit():
            code, _, after = fault.partition(" ")
            wanted = {
                "": {},
                "later": {"Retry_After": "0.01"},
                "date": {"Retry_After": "Wed, 21 Oct 2037 07:28:00 GMT"},
            }
            text = json.dumps({"error": {"message": f"{self.server.message}: {code}"}})
            self.head(int(code), len(text), **wanted.get(after, {"Retry_After": after}))
            self.wfile.write(text.encode())
        else:
            empty = choice | {"message": {"role": "assistant", "content": ""}}
            blank = choice | {"message": {"role": "assistant", "content": None}}
            bodies = {
                None: whole,
                "broken": whole[:-9],
                "html": "<html>sorry</html>",
                "no choices": '{"choices": []}',
                "null choices": '{"choices": null}',
                "error in 200": '{"error": {"message": "overloaded"}}',
                "empty": json.dumps({"choices": [empty]}),
                "blank": json.dumps({"choices": [blank]}),
            }
            text = bodies.get(fault, fault or "")  # anything else is a body of its own
            self.head(200, len(text.encode()), "text/html" if fault == "html" else "application/json")
            self.wfile.write(text.encode())


@contextlib.contextmanager
def serving(*args: Any, **kwargs: Any) -> Iterator[FakeServer]:
    """A server in a thread."""
    fake = FakeServer(*args, **kwargs)
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.shutdown()
        fake.server_close()
        thread.join()


def dead_url() -> str:
    """A URL where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
