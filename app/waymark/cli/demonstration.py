"""``waymark demo``: the whole service on one machine, shown in a table, and checked.

It starts ``waymark gateway`` as a process of its own on the embedded Redis, or uses a service that runs already;
starts two simulated vLLM engines that publish real frames and tokenize texts, lets them work on prompts that share a
prefix, and asks ``/query``. Every answer is compared with the real contents of the engines' caches; the first wrong
one ends the demo with a sentence. In a service that runs already, the engines have a tenant of their own, and are
unregistered at the end. On a terminal a service that the demo has started keeps running, with more engines and more
requests, so that there is something to look at: one of the engines is drained, and one has been stopped.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from uuid import uuid4

from waymark.base.record import record
from waymark.base.shown import shown
from waymark.client import AsyncClient, Refused, StreamStatus, Unavailable
from waymark.console.progress import PromptMatch
from waymark.console.service import RemoteService
from waymark.simulator.encode import CPU, GPU
from waymark.simulator.engine import SimulatedEngine, build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.workload import SimulatedPrompt, tokens_of_text

TENANT = "demo"
MODEL = "demo-model"
BLOCK_SIZE = 16
#: The beginning of the text, two blocks, for a reader without token ids at hand.
BEGINNING = (
    "A router asks which engine has the beginning of a prompt. The engine with most of it need not compute that part "
    "again, so the first token comes sooner."
)
#: A prompt of thirteen blocks, as long as the instructions of a small assistant.
TEXT = (
    f"{BEGINNING} What an engine has is kept in blocks of a few tokens each. A block counts only if all the blocks "
    "before it are there too, because each token depends on those before it. When the memory of a graphics card is "
    "full, an engine moves old blocks to the memory of its machine, then to a disk, or forgets them. Each time it "
    "sends an event, and an index of these events knows what every engine has at this moment. The engine with the "
    "longest match is often the best choice, but not always: if many requests wait there, another one may answer "
    "earlier, although it computes the whole prompt. So a router compares the tokens to compute with the work that "
    "is under way, and picks the engine that costs least. Two people who ask about the same document then meet the "
    "same engine, and the second of them waits only for the words of the question."
)
_GPU_BLOCKS, _CPU_BLOCKS = 24, 64
#: How long the demo waits for a step, and for one answer of the service. Both may take long on a busy machine, and a
#: single late answer would end a demo that stays.
_DEADLINE_SECONDS, _ANSWER_SECONDS = 120.0, 30.0
#: The port of a demo that stays, if it is free: the commands ask there.
_USUAL_PORT = 13333
_PORT = "WAYMARK_PORT"
#: How many engines a demo that stays has, and the names of the drained and the stopped one.
ENGINES, DRAINED, STOPPED = 8, "engine-6", "engine-7"
#: The users of a demo that stays, and the tokens after which one begins another chat.
_USERS, _CHAT_TOKENS_MAX = 10, 640
_READ_SECONDS = 1.0
#: How long the demo waits for the interrupt that ended its service.
_INTERRUPT_SECONDS = 2.0
_SYSTEM = tuple(range(1000, 1160))
#: The beginnings of chats.
_SYSTEMS = (_SYSTEM, tuple(range(7000, 7256)), tuple(range(8000, 8128)))

Shown = Callable[[list["PromptMatch"], str], None]
"""Gets the lines of the table, and the URL of the service that stays."""


class DemoFailed(Exception):
    """A failure of the demo, with a sentence about its cause."""


@record(frozen=True, slots=True)
class DemoPrompt:
    """A prompt, the engines which worked on it, and its name in the table."""

    label: str
    prompt: SimulatedPrompt
    engines: tuple[int, ...]


@record(frozen=True, slots=True)
class _DemoService:
    """The Waymark of the demo; ``process`` is None if it ran before and continues afterwards."""

    base: str
    client: AsyncClient
    process: asyncio.subprocess.Process | None = None
    worker_id: str | None = None
    """The name of the ingest worker in ``process``."""

    @property
    def tenant_id(self) -> str:
        """The tenant of the engines: in the demo's own service, the one that the page and the commands ask about."""
        return TENANT if self.process is None else "default"

    async def is_ready(self) -> bool:
        """Return whether the service answers, and no other has taken the port meanwhile."""
        if not await self.client.ready():
            return False
        return self.worker_id is None or self.worker_id in (await self.client.workers()).workers


async def run_demo(
    url: str | None = None,
    api_token: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    stay: Shown | None = None,
) -> list[PromptMatch]:
    """Run the demo with the Waymark at ``url`` or with one of its own. Return the lines of the table, or raise
    DemoFailed.

    ``say`` gets a line for each step. With ``stay`` the service goes on with requests until this is cancelled.
    """
    say("starting Waymark on an embedded Redis" if url is None else f"asking {url}")
    async with AsyncExitStack() as stack:
        if url is not None:
            service = await stack.enter_async_context(_running_service(url, api_token))
        else:
            # A demo that stays has stopped one engine itself, so the log need not report this. On a terminal, lines of
            # the service would run into the progress.
            level = "warning" if stay is None and not sys.stderr.isatty() else "error"
            service = await stack.enter_async_context(_started_service(_wanted_port(stay is not None), level))
        with _sentences():
            return await _show(service, say, stay)


async def _show(service: _DemoService, say: Callable[[str], None], stay: Shown | None) -> list[PromptMatch]:
    say("waiting until it is ready")
    await _until(service.is_ready, "the service to become ready", service)
    host = await asyncio.to_thread(_own_address, service.base)
    async with AsyncExitStack() as stack:
        engines = [await _joined(stack, service, host, number) for number in range(2)]
        questions = list(_questions())
        say(f"two simulated engines work on {len(questions)} prompts")
        for question in questions:
            for i in question.engines:
                await engines[i].prefill(question.prompt)
        lines: list[PromptMatch] = []
        for question in questions:
            say(f"asking for '{question.label}'")
            lines += await _ask(service, question, engines)
        if stay is not None:
            stay(lines, service.base)
            await _stay(stack, service, host, engines)
        return lines


async def _stay(stack: AsyncExitStack, service: _DemoService, host: str, engines: list[SimulatedEngine]) -> None:
    """Go on with more engines, until this is cancelled."""
    chance, stopping = random.Random(0), AsyncExitStack()
    for number in range(len(engines), ENGINES):
        of_engine = stopping if f"engine-{number}" == STOPPED else stack
        engines.append(await _joined(of_engine, service, host, number, gpu_blocks=chance.choice((32, 48, 64))))
        # Each further engine computes some prompts at first, a different number in each.
        for _ in range(number - 1):
            await engines[-1].prefill(SimulatedPrompt(_next_turn(chance.choice(_SYSTEMS), chance)))
    await stack.enter_async_context(stopping)
    with RemoteService(service.base) as remote:
        drained = {"instance_id": DRAINED, "tenant_id": service.tenant_id, "weight": 0}
        await asyncio.to_thread(remote.post, "/weight", drained)

    async def is_known() -> bool:
        of_stopped = [
            publisher for publisher in (await service.client.workers()).publishers if publisher.instance_id == STOPPED
        ]
        return [publisher.status for publisher in of_stopped] == [StreamStatus.ACTIVE]

    await _until(is_known, f"the events of {STOPPED}", service)
    await stopping.aclose()
    by_name = {f"engine-{number}": engine for number, engine in enumerate(engines)}
    del by_name[STOPPED]
    try:
        await asyncio.gather(_read(by_name), *(_chat(service, by_name, random.Random(seed)) for seed in range(_USERS)))
    except Unavailable:
        # Ctrl-C reaches the service, too: a call may fail before the interrupt comes, or in its place.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from None
        await asyncio.sleep(_INTERRUPT_SECONDS)
        raise


async def _joined(
    stack: AsyncExitStack, service: _DemoService, host: str, number: int, *, gpu_blocks: int = _GPU_BLOCKS
) -> SimulatedEngine:
    """Start an engine until ``stack`` closes, and register it; at its end a service that ran before forgets it."""
    engine = build_engine(
        f"tcp://{host}:0",
        f"tcp://{host}:0",
        block_size=BLOCK_SIZE,
        gpu_blocks=gpu_blocks,
        cpu_blocks=_CPU_BLOCKS,
        seed=number,
    )
    await stack.enter_async_context(engine.publisher)
    served = EngineHttp(engine, host=host, port=0, model_name=MODEL, block_size=BLOCK_SIZE, gpu_blocks=gpu_blocks)
    await stack.enter_async_context(served)
    name = f"engine-{number}"
    await service.client.register(
        name,
        engine.publisher.endpoint,
        replay_endpoint=engine.publisher.replay_endpoint,
        model=MODEL,
        tenant_id=service.tenant_id,
        block_size=BLOCK_SIZE,
        address=served.url,
    )
    if service.process is None:
        stack.push_async_callback(service.client.unregister, name, tenant_id=service.tenant_id)
    return engine


def _next_turn(tokens: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
    """Return a prompt with another question at its end."""
    begin = chance.randrange(100_000, 1_000_000)
    return tokens + tuple(range(begin, begin + 16 * chance.randint(1, 6)))


async def _chat(service: _DemoService, engines: dict[str, SimulatedEngine], chance: random.Random) -> None:
    """Send the requests of one user, turn by turn and chat by chat, each to the engine that Waymark picks."""
    tokens = chance.choice(_SYSTEMS)
    while True:
        if len(tokens) >= _CHAT_TOKENS_MAX:
            tokens = chance.choice(_SYSTEMS)
        tokens = _next_turn(tokens, chance)
        target = await service.client.select(MODEL, tokens, tenant_id=service.tenant_id).begin()
        engine = engines.get(target.selection.instance_id)
        if engine is None:
            await target.end("failed")
            continue
        cached, _, _ = _held(engine, tokens)
        await engine.prefill(SimulatedPrompt(tokens))
        target.used(cached, prompt_tokens=len(tokens))
        await target.first_token()
        await asyncio.sleep(chance.uniform(0.2, 4.0))
        await target.end()
        await asyncio.sleep(chance.uniform(0.2, 3.0))


async def _read(engines: dict[str, SimulatedEngine]) -> None:
    """Send the text to one engine again and again, and its first half to another one, without asking Waymark, so that
    two engines of the fleet always have it, in part or whole.
    """
    tokens = tokens_of_text(TEXT)
    while True:
        for name, count in (("engine-1", len(tokens)), ("engine-3", len(tokens) // 2)):
            await engines[name].prefill(SimulatedPrompt(tokens[:count]))
        await asyncio.sleep(_READ_SECONDS)


def _questions() -> Iterator[DemoPrompt]:
    """Yield prompts that share a system prompt, as chats do."""
    system = _SYSTEM
    first = tuple(range(2000, 2096))
    yield DemoPrompt("chat A", SimulatedPrompt(system + first), (0,))
    yield DemoPrompt("chat A, next turn", SimulatedPrompt(system + first + tuple(range(3000, 3064))), (0,))
    yield DemoPrompt("chat B, same system prompt", SimulatedPrompt(system + tuple(range(4000, 4128))), (0, 1))
    yield DemoPrompt("chat C, nobody has seen it", SimulatedPrompt(system + tuple(range(5000, 5064))), ())
    yield DemoPrompt("another topic", SimulatedPrompt(tuple(range(6000, 6064))), ())
    yield DemoPrompt("a text", SimulatedPrompt(tokens_of_text(BEGINNING)), (1,))


async def _ask(service: _DemoService, question: DemoPrompt, engines: list[SimulatedEngine]) -> list[PromptMatch]:
    """Return the answer to one question, once it agrees with the caches. Raise DemoFailed if it never does."""
    tokens = question.prompt.tokens
    expected = {f"engine-{i}": _held(engine, tokens) for i, engine in enumerate(engines)}
    last: dict[str, tuple[int, int, int]] = {}

    async def is_right() -> bool:
        last.clear()
        try:
            matches = await service.client.query(MODEL, tokens, BLOCK_SIZE, tenant_id=service.tenant_id)
        except Unavailable:  # the machine may be busy; a missing answer is reported at the deadline
            return False
        last.update({name: (match.longest_matched, match.gpu, match.media[CPU]) for name, match in matches.items()})
        return last == expected

    try:
        await _until(is_right, f"the right answer for '{question.label}'", service)
    except DemoFailed as exc:
        raise DemoFailed(f"{exc}: /query says {last}, the engines' caches say {expected}") from None
    return [PromptMatch(question.label, len(tokens), name, *counted) for name, counted in sorted(last.items())]


def _held(engine: SimulatedEngine, tokens: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (matched, GPU, CPU) in tokens, counted in the engine's own cache."""
    matched = gpu = cpu = 0
    for media in engine.caches[0].held(tokens):
        if not media:
            break
        matched += BLOCK_SIZE
        gpu += BLOCK_SIZE * (GPU in media)
        cpu += BLOCK_SIZE * (CPU in media)
    return matched, gpu, cpu


# ---- the service, and talking to it ----------------------------------------------------------------


@contextmanager
def _sentences() -> Iterator[None]:
    """End the demo with the service's sentence, if it rejects a call."""
    try:
        yield
    except Refused as exc:
        raise DemoFailed(f"the service answered {exc.status}: {exc}") from None
    except Unavailable as exc:
        raise DemoFailed(str(exc)) from None


@asynccontextmanager
async def _running_service(url: str, api_token: str | None) -> AsyncIterator[_DemoService]:
    base = url.rstrip("/")
    if not re.fullmatch(r"https?://[^/@:]+(:\d{1,5})?(/.*)?", base):
        raise DemoFailed(f"url is {shown(url)}; it must be a URL such as http://127.0.0.1:13333")
    # A URL means that a service runs there; if none does, this is an error at once.
    with RemoteService(base, api_token) as remote:
        await asyncio.to_thread(remote.answer, "GET", "/health")
    async with AsyncClient(base, api_token=api_token, timeout=_ANSWER_SECONDS) as client:
        yield _DemoService(base, client)


@asynccontextmanager
async def _started_service(port: int, log_level: str) -> AsyncIterator[_DemoService]:
    worker_id = f"demo-{uuid4().hex}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    environ |= {"WAYMARK_HOST": "127.0.0.1", _PORT: str(port), "WAYMARK_LOG_LEVEL": log_level}
    environ |= {"WAYMARK_WORKER_ID": worker_id}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "waymark", "gateway", env=environ)
    base = f"http://127.0.0.1:{port}"
    try:
        async with AsyncClient(base, timeout=_ANSWER_SECONDS, trust_env=False) as client:  # no proxy is asked
            yield _DemoService(base, client, process, worker_id)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


async def _until(is_so: Callable[[], Awaitable[bool]], condition: str, service: _DemoService) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not await is_so():
        if service.process is not None and service.process.returncode is not None:
            raise DemoFailed(
                f"the service ended with code {service.process.returncode} while the demo waited for {condition}"
            )
        if time.monotonic() > deadline:
            raise DemoFailed(f"waited {_DEADLINE_SECONDS:g} s for {condition}")
        await asyncio.sleep(0.05)


def _own_address(base: str) -> str:
    """Return our IPv4 address on the way to the service, at which its workers reach us."""
    parts = urllib.parse.urlsplit(base)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((str(parts.hostname), parts.port or 80))  # does not send a packet
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise DemoFailed(f"no IPv4 address leads to {base}: {exc}") from None


def _wanted_port(is_usual: bool) -> int:
    """Return the port of ``WAYMARK_PORT``, or else the usual one if it is free, or any. Raise DemoFailed if the port
    that was asked for is taken.
    """
    port_text = os.environ.get(_PORT, "")
    if port_text and not (port_text.isascii() and port_text.isdigit() and int(port_text) < 2**16):
        raise DemoFailed(f"{_PORT} is {shown(port_text)}; it must be a port, of 1 to 65535, or 0 for any that is free")
    port = _free_port(int(port_text) if port_text else _USUAL_PORT if is_usual else 0)
    if port is None and port_text:
        raise DemoFailed(f"{_PORT} is {port_text}, and another process listens there; give another port, or none")
    return port or _free_port(0) or 0


def _free_port(wanted: int) -> int | None:
    """Return a free port, for 0 any; None if the wanted port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return None
        return int(probe.getsockname()[1])
