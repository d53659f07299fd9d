"""Grading by requests to a server, and the grader that asks a server of one's own.

    checks -> JSON, a request each -> replies, in JSON -> outcomes, or why there is none

Who asks waits and computes nothing, so it takes no worker processes: the process of the
run makes all requests of a batch, several at a time. A server that is slow, dies or
answers something else costs outcomes and bounded time, never the run.
"""

import asyncio
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from curax.settings.config_types import Count, Natural, Positive
from curax.settings.declared import declares
from curax.settings.packages import install, is_installed
from curax.verify.serve import Verdict, error_line, printable, short, verdict_of
from curax.verify.workers import Check, Pool

if TYPE_CHECKING:
    import httpx

TOKEN = "CURAX_HTTP_TOKEN"  # environment variable of the token, unless another is named
KINDS = {"timeout", "crash", "error"}  # of reasons with words of the server
WAIT = 0.5  # seconds before the first retry, doubled before each further one
LEAST = 10  # failed attempts of a batch
LARGEST = 2**22  # bytes of a reply


class MissingError(Exception):
    """There is no outcome; the message is the reason, as a verdict has it."""


class LaterError(Exception):
    """An attempt has failed in a way that may pass, after `wait` seconds if given."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class Client:
    """Requests to a server, several at a time.

    Failed attempts of a call have a budget: `parallel * (retries + 1)`, at least 10,
    and one more for each request that is answered. Where it is spent, nothing is sent
    any more and what is left is missing, so a server that never answers costs about
    `retries + 1` times the time limit. A request that nobody waits for any more is
    cancelled: its connection is closed.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str,
        timeout: float,
        retries: int,
        parallel: int,
        token_env: str,
        default_env: str = TOKEN,
        example: str = "http://127.0.0.1:8000/grade",
        largest: int = LARGEST,
    ):
        """Check the options; nothing is sent.

        Args:
            name: of what asks, for messages.
            url: address.
            timeout: seconds per attempt, in all.
            retries: further attempts per request.
            parallel: requests, and connections, at the same time.
            token_env: environment variable with the token.
            default_env: the one that need not be there.
            example: of an address, for messages.
            largest: bytes of a reply.

        Raises:
            ValueError: an option is wrong, in a sentence.
        """
        if fault := _fault(url, default_env):
            raise ValueError(f"{name} has a url {fault}; write one such as {example}.")
        for option, value in {"timeout": timeout, "parallel": parallel}.items():
            if not value > 0:
                raise ValueError(f"{name} has {option}={value}; raise it above 0.")
        if retries < 0:
            raise ValueError(f"{name} has retries={retries}; set it to 0 or more.")
        # Capitals alone, as it may be the token that somebody writes here.
        if not re.fullmatch("[A-Z_][A-Z0-9_]*", token_env):
            raise ValueError(
                f"{name} has a token_env that is no name in capitals; name the "
                f"environment variable that holds the token, such as {default_env}."
            )
        self._name, self._url, self._timeout = name, url, timeout
        self._retries, self._parallel, self._env = retries, parallel, token_env
        self._default_env, self._largest = default_env, largest
        self._token, self._budget = "", 0

    def start(self) -> None:
        """Take the token from the environment; whether the server answers is not asked.

        Raises:
            RuntimeError: httpx or the token is missing, or there can be no client,
                in a sentence.
        """
        fault = None
        self._token = os.environ.get(self._env, "").strip()
        if not is_installed("httpx"):
            fault = f"the package httpx is not installed; run {install('http')}"
        elif not (self._token or self._env == self._default_env):
            fault = f"there is no environment variable {self._env}; export it"
        elif not re.fullmatch("[!-~]*", self._token):
            fault = f"the token in {self._env} has blanks or is not ASCII; mend it"
        else:
            fault = _environment()
        if fault:
            raise RuntimeError(f"{self._name} cannot ask {self._url}: {fault}.")

    def replies(
        self,
        bodies: Sequence[Any],
        place: str = "",
        *,
        method: str = "POST",
        text: bool = False,
    ) -> list[Any]:
        """The reply to each body, in order: JSON values, or why there is none.

        Args:
            bodies: JSON values, a request each.
            place: path behind the address.
            method: of HTTP; a body of GET is not sent.
            text: a reply that is no JSON is text, not missing.

        Returns:
            JSON values, and a `MissingError` in place of each that is missing.
        """
        if not bodies:
            return []
        found = _run(self._all(bodies, self._url + place, method))
        return [_read(one, text) if isinstance(one, bytes) else one for one in found]

    async def _all(
        self, bodies: Sequence[Any], url: str, method: str
    ) -> list[bytes | MissingError]:
        import httpx

        self._budget = max(LEAST, self._parallel * (self._retries + 1))
        found: list[bytes | MissingError] = [b""] * len(bodies)
        rest = iter(enumerate(bodies))
        secret = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        async with httpx.AsyncClient(
            headers={"Content-Type": "application/json"} | secret,
            timeout=None,  # `_attempt` has one, of all that an attempt does
            limits=httpx.Limits(max_connections=self._parallel),
            follow_redirects=False,  # they would take the token elsewhere
        ) as client:

            async def one_after_the_other() -> None:
                for n, body in rest:
                    content = json.dumps(body).encode() if method == "POST" else None
                    try:
                        request = client.build_request(method, url, content=content)
                    except (httpx.InvalidURL, ValueError) as error:
                        found[n] = MissingError(f"error: {error}")
                        continue
                    try:
                        found[n] = await self._reply(client, request)
                    except MissingError as missing:
                        found[n] = missing

            lines = min(self._parallel, len(bodies))
            await asyncio.gather(*(one_after_the_other() for _ in range(lines)))
        return found

    async def _reply(
        self, client: "httpx.AsyncClient", request: "httpx.Request"
    ) -> bytes:
        """What the server says, asked again where that may help."""
        reason = "error: not asked, as too many requests had failed before"
        for attempt in range(self._retries + 1):
            if self._budget <= 0:
                break
            try:
                reply = await self._attempt(client, request)
                self._budget += 1
                return reply
            except MissingError:
                self._budget += 1
                raise
            except TimeoutError:
                self._budget -= 1
                raise MissingError("timeout") from None
            except LaterError as error:
                self._budget -= 1
                reason = f"error: {error}"
                wait = WAIT * 2 ** min(attempt, 9) if error.wait is None else error.wait
                if wait > self._timeout:
                    break
                if attempt < self._retries and self._budget > 0:
                    await asyncio.sleep(wait)
        raise MissingError(reason)

    async def _attempt(
        self, client: "httpx.AsyncClient", request: "httpx.Request"
    ) -> bytes:
        import httpx

        data = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                response = await client.send(request, stream=True)
                try:
                    async for part in response.aiter_bytes():
                        data += part
                        if len(data) > self._largest:
                            raise MissingError(
                                f"error: a reply of over {self._largest} bytes"
                            )
                finally:
                    await response.aclose()
        except httpx.TransportError as error:
            raise LaterError(error_line(error)) from None
        except (MissingError, TimeoutError):
            raise
        except Exception as error:  # whatever a server makes httpx raise
            raise MissingError(f"error: {error_line(error)}") from None
        status = f"HTTP {response.status_code}"
        if response.status_code == 429 or response.status_code >= 500:
            raise LaterError(f"{status}{_words(data)}", _seconds(response.headers))
        if not response.is_success:
            said = ", which is not followed" if response.is_redirect else _words(data)
            raise MissingError(f"error: {status}{said}")
        return bytes(data)

    def quoted(self, reason: str) -> str:
        """A reason as one printable line that does not hold the token."""
        if self._token:
            reason = reason.replace(self._token, "***")
        return printable(short(reason))


class Requests(Client, Pool):
    """A pool that grades by requests to a server, without processes."""

    def __init__(
        self,
        name: str,
        body: Callable[[Sequence[Check]], Any],
        read: Callable[[Any, int], list[Verdict]],
        *,
        batch: int = 1,
        **options: Any,
    ):
        """Check the options; nothing is sent.

        Args:
            name: of the grader, for messages.
            body: what is sent for checks, as JSON values.
            read: verdicts by a reply, as JSON values, and how many there must be.
            batch: checks per request.
            options: of `Client`.

        Raises:
            ValueError: an option is wrong, in a sentence.
        """
        super().__init__(name, **options)
        if not batch > 0:
            raise ValueError(f"{name} has batch={batch}; raise it above 0.")
        self._body, self._read, self._batch = body, read, batch
        self._lock = threading.Lock()

    def grade(self, checks: Sequence[Check]) -> list[Verdict]:
        """The verdict of each check, in order, as `Workers.grade`.

        Equal checks are sent once; batches are graded one at a time.

        Raises:
            RuntimeError: as of `start`.
        """
        texts: list[str] = []  # of each check by itself, or why it has none
        verdicts: dict[str, Verdict] = {}
        unequal: dict[str, Check] = {}
        for check in checks:
            try:
                texts.append(json.dumps(self._body([check]), allow_nan=False))
                unequal[texts[-1]] = check
            except (TypeError, ValueError, RecursionError) as error:
                texts.append(f"error: {error_line(error)}")
                verdicts[texts[-1]] = texts[-1]
        every, size = list(unequal.values()), self._batch
        groups = [every[i : i + size] for i in range(0, len(every), size)]
        with self._lock:
            self.start()
            replies = self.replies([self._body(group) for group in groups])
        given = map(self._verdicts, replies, groups)
        verdicts |= zip(unequal, itertools.chain(*given), strict=True)
        return [verdicts[text] for text in texts]

    def one(self, prompt: str, completion: str, answer: Any) -> float | None:
        """The outcome of one check; RuntimeError with the reason if it is missing."""
        (verdict,) = self.grade([(prompt, completion, answer)])
        if isinstance(verdict, str) and verdict != "none":
            raise RuntimeError(verdict)
        return None if isinstance(verdict, str) else verdict

    def _verdicts(self, reply: Any, group: list[Check]) -> list[Verdict]:
        try:
            if isinstance(reply, MissingError):
                raise reply
            verdicts = self._read(reply, len(group))
        except MissingError as missing:
            verdicts = [str(missing)] * len(group)
        return [self.quoted(one) if isinstance(one, str) else one for one in verdicts]


def _fault(url: str, token_env: str) -> str | None:
    """Why an address is none, without what may be a password in it."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "that is no address"
    if parts.username is not None or parts.password is not None:
        return f"with a user or a password, which files would hold (set {token_env})"
    if parts.scheme not in ("http", "https") or not named:
        return f"{url!r}, which is no http:// or https:// address of a server"
    if not re.fullmatch("[!-~]+", url):
        return f"{url!r} with blanks or letters outside ASCII"
    return None


def _environment() -> str | None:
    """Why httpx makes no client where this process runs; None: it does."""
    import httpx

    try:
        httpx.AsyncClient()
    except Exception as error:  # whatever variables make it raise
        return (
            f"httpx cannot be set up ({printable(error_line(error))}); mend the "
            "variables of proxies and certificates (ALL_PROXY, SSL_CERT_FILE, ...)"
        )
    return None


def _run(asking: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where a loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(asking)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asking).result()


def _seconds(headers: Any) -> float | None:
    """Seconds of Retry-After; None where there are none, or a date."""
    try:
        wait = float(headers.get("Retry-After", ""))
    except ValueError:
        return None
    return wait if wait >= 0 else None


def _read(data: bytes, text: bool) -> Any:
    """The JSON values of a reply; else its text, or a MissingError."""
    try:
        return json.loads(data, parse_int=float)  # of any length
    except (ValueError, RecursionError):
        if text:
            return data.decode(errors="replace")
        return MissingError(f"error: the reply is no JSON{_words(data)}")


def _words(data: bytes | bytearray) -> str:
    """What a reply says, for a reason; whole, as the token may be in it."""
    text = data.decode(errors="replace").strip()
    return f": {text}" if text else ""


# A program of one's own


def _checks(checks: Sequence[Check]) -> Any:
    names = ("prompt", "completion", "answer")
    return {"checks": [dict(zip(names, check, strict=True)) for check in checks]}


def _outcomes(reply: Any, count: int) -> list[Verdict]:
    outcomes = reply.get("outcomes") if isinstance(reply, dict) else None
    if not isinstance(outcomes, list):
        raise MissingError('error: the reply has no list "outcomes"')
    if len(outcomes) != count:
        raise MissingError(f"error: {len(outcomes)} outcomes for {count} checks")
    return [_reason(x) if isinstance(x, str) else verdict_of(x) for x in outcomes]


def _reason(text: str) -> str:
    """The reason that a server gives, with a kind that has a metric."""
    return text if text.partition(":")[0] in KINDS else f"error: {text}"


def _pool(**options: Any) -> Requests:
    return Requests("graders.http", _checks, _outcomes, **options)


@declares(package="httpx", pool=_pool)
def http(
    prompt: str,
    completion: str,
    answer: Any,
    *,
    url: str,
    batch: Count = 1,
    timeout: Positive = 30.0,
    retries: Natural = 2,
    parallel: Count = 16,
    token_env: str = TOKEN,
) -> float | None:
    """The outcome by a server of one's own, such as a sandbox that runs code.

    It gets, by POST, `{"checks": [{"prompt": ..., "completion": ..., "answer": ...}]}`
    and returns `{"outcomes": [...]}` in the same order: a number in [0, 1], null where
    it cannot be told, or text, the reason why it is missing ("timeout: 10 s").

    Asked again is what may pass: no connection, one that ends, the statuses 429 and
    from 500, at the time that `Retry-After` states in seconds. What takes too long is
    missing at once. So the same check may reach the server several times.

    Args:
        prompt: is sent.
        completion: likewise.
        answer: likewise, so it must be a JSON value.
        url: address; it is stored with the config, and must hold no secret.
        batch: checks per request.
        timeout: seconds per attempt, from the connection to the end of the reply.
        retries: further attempts per request; all of a batch have a budget besides
            (`Requests`).
        parallel: requests at the same time, by each process of the run.
        token_env: environment variable with a token, sent as `Authorization: Bearer`;
            one that is named must be there.

    Raises:
        RuntimeError: the outcome is missing, for this reason.
    """
    pool = _pool(
        url=url,
        batch=batch,
        timeout=timeout,
        retries=retries,
        parallel=parallel,
        token_env=token_env,
    )
    return pool.one(prompt, completion, answer)
