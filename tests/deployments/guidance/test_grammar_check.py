"""The checker: verdicts of plain, hard and hostile grammars, and the deaths of its processes."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from rayfin.actors.errors import EngineUnavailable, InvalidRequest, Overloaded
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance import grammar_check as module
from rayfin.deployments.guidance.compile_check import InlineChecker, Verdict, VerdictCache, is_plain
from rayfin.deployments.guidance.grammar import make_grammar
from rayfin.deployments.guidance.grammar_check import CheckQueue, ProcessChecker, _Check
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow(reason="starts processes, which compile bombs")]


def schema(value: Any) -> str:
    """The text of a schema that nothing has been refused in."""
    return json.dumps({"grammars": [{"json_schema": value}]})


def pattern(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)


LONG = 600  # seconds; only a failure waits so long
PATIENT = f"helper.GRAMMAR_STARVED_SECONDS = {LONG}"
"""Children wait for their processor time, however busy the machine is."""
ENDLESS = f"helper.GRAMMAR_SHORT_SECONDS = helper.GRAMMAR_CPU_LIMIT_SECONDS = {LONG}"
"""A child may compute for as long as its test looks at it."""
NO_SPARES = "helper.CHECKER_SPARE_SECONDS = 0.1"

PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PATTERNS = {"type": "string", "allOf": [{"pattern": f".*w{i}.*"} for i in range(20)]}
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)} | {"d20000": {}}

RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(1900)) + 'r1900: "x"'

HOSTILE = [
    (schema(PATTERNS), "schema_too_complex"),
    (pattern("(x{1000}){1000}"), "schema_too_complex"),
    (schema({"const": "x" * 10**6}), "schema_too_complex"),
    ("start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "schema_too_complex"),
    (schema({"$defs": CHAIN, "$ref": "#/$defs/d0"}), "schema_too_complex"),  # the stack
    (RULES, "schema_too_complex"),  # a thread of a runner has enough, and a child has less
    (schema({"$ref": "#"}), "unsatisfiable_schema"),
    (schema({"enum": []}), "unsatisfiable_schema"),
    (schema({"type": "strng"}), "invalid_schema"),
    (schema({"$ref": "#/$defs/none"}), "invalid_schema"),
    (schema({"not": {}}), "unsupported_schema"),
    ("start: /[.*/", "invalid_schema"),
    ("start: missing", "invalid_schema"),
    ('start: "\0"', "invalid_schema"),
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(str(DEMO_FOLDER))


class Helpers:
    """Makes checkers whose helpers have other limits: none of them is of time that has passed."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.checkers: list[ProcessChecker] = []
        self._folder = folder
        self._tokenizer = tokenizer

    def have(self, *settings: str) -> None:
        """Those that start from now on."""
        lines = (
            "import os, sys, time",
            "from rayfin.deployments.guidance import grammar_check_process as helper",
            *(PATIENT, *settings),
            "helper.main(*map(int, sys.argv[1:]))",
        )
        (self._folder / "other_helper.py").write_text("\n".join(lines))

    def checker(self, *settings: str, **how: Any) -> ProcessChecker:
        self.have(*settings)
        self.checkers.append(ProcessChecker(self._tokenizer, **how))
        return self.checkers[-1]


@pytest.fixture
async def helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, anyio_backend: str
) -> AsyncIterator[Helpers]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "MODULE", "other_helper")
    monkeypatch.setattr(module, "CHECKER_SILENT_SECONDS", LONG)
    helpers = Helpers(tmp_path, tokenizer)
    yield helpers
    for checker in helpers.checkers:
        checker.close()
    await asyncio.sleep(0)


@pytest.fixture
async def checker(helpers: Helpers) -> ProcessChecker:
    checker = helpers.checker(NO_SPARES)
    await checker.check([schema(PLAIN)], "schema")
    return checker


async def code_of(checker: ProcessChecker, text: str, tenant: str = "") -> str:
    try:
        await checker.check([text], "schema", tenant)
    except (InvalidRequest, Overloaded) as error:
        assert isinstance(error, Overloaded) or error.param == "schema"
        assert "\n" not in str(error) and len(str(error)) < 400
        return error.code
    return "ok"


async def test_known_verdicts_cost_nothing(checker: ProcessChecker) -> None:
    assert checker.pid is not None
    os.kill(checker.pid, signal.SIGSTOP)
    assert await code_of(checker, schema(PLAIN)) == "ok"


@pytest.mark.parametrize("most", [0, 60])
async def test_which_grammars_are_quick(helpers: Helpers, most: int) -> None:
    imported = "from rayfin.deployments.guidance import compile_check as other"
    checker = helpers.checker(imported, f"other.GRAMMAR_QUICK_SECONDS = {most}")
    for _ in range(2):
        assert await checker.check([schema(PLAIN), pattern("a+")], None) is (most > 0)
    form = await checker.form(long_form(), "schema")
    assert await checker.check([form.text], None) is (most > 0)


async def test_the_same_grammar_is_checked_once(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    send = module._Helper.send
    monkeypatch.setattr(
        module._Helper, "send", lambda own, check: (sent.append(check), send(own, check))
    )
    codes = await asyncio.gather(*(code_of(checker, pattern("a+b")) for _ in range(20)))
    assert codes == ["ok"] * 20 and len(sent) == 1


@pytest.mark.parametrize(("text", "code"), HOSTILE, ids=lambda value: str(value)[:40])
async def test_hostile_grammars(checker: ProcessChecker, text: str, code: str) -> None:
    pid = checker.pid
    assert await code_of(checker, text) == code
    assert checker.pid == pid, "the helper has died"
    await no_children(pid)
    assert await code_of(checker, schema({"maxLength": len(text), **PLAIN})) == "ok"


async def test_the_event_loop_and_plain_grammars_go_on_beside_bombs(helpers: Helpers) -> None:
    checker = helpers.checker(
        f"helper.GRAMMAR_CHECK_SECONDS = helper.GRAMMAR_CPU_LIMIT_SECONDS = {LONG}"
    )
    bombs = [
        asyncio.create_task(code_of(checker, schema({**PATTERNS, "minLength": i}), "hostile"))
        for i in range(4)
    ]
    while not checker.pid or len(children_of(checker.pid)) < module.MAX_CHILDREN:
        await asyncio.sleep(0.01)
    for number in range(20):
        assert await code_of(checker, schema({**PLAIN, "title": str(number)}), "kind") == "ok"
    assert not any(task.done() for task in bombs)
    for task in bombs:
        task.cancel()


async def test_a_killed_helper_is_replaced(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[int] = []
    sent: list[dict[str, Any]] = []
    frame = module.frame
    monkeypatch.setattr(module, "frame", lambda own: (sent.append(own), frame(own))[1])
    checker = helpers.checker(ENDLESS, on_restart=lambda: restarts.append(1))
    await checker.check([schema(PLAIN)], None)
    first = checker.pid
    assert first is not None
    asked = asyncio.create_task(code_of(checker, schema(PATTERNS)))
    while not children_of(first):
        await asyncio.sleep(0.01)
    (child,) = children_of(first)
    helpers.have()
    os.kill(first, signal.SIGKILL)
    assert await asked == "schema_too_complex"  # of the second helper
    assert checker.pid != first and restarts == [1]
    hard = [own["fresh"] for own in sent if own.get("text") == schema(PATTERNS)]
    assert hard == [False, True]
    await gone(first, child)


async def test_a_stopped_helper_is_replaced(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_patient() -> None:
        monkeypatch.setattr(module, "CHECKER_SILENT_SECONDS", LONG)

    checker = helpers.checker(on_restart=be_patient)
    await checker.check([schema(PLAIN)], None)
    pid = checker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "CHECKER_SILENT_SECONDS", 0.05)
    assert await code_of(checker, pattern("stopped")) == "ok"
    assert checker.pid != pid
    await gone(pid)


async def test_a_loop_that_stood_still_has_heard_its_helper(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = helpers.checker(f"helper.CHECKER_TICK_SECONDS = {LONG}")  # its verdict comes first
    await checker.check([schema(PLAIN)], None)
    pid, helper = checker.pid, checker._helper
    assert helper is not None
    monkeypatch.setattr(module, "CHECKER_SILENT_SECONDS", 0.01)
    asked = asyncio.create_task(code_of(checker, pattern("still")))
    await asyncio.sleep(0)
    assert select.select([helper._writer.get_extra_info("socket").fileno()], [], [], LONG)[0]
    time.sleep(0.02)
    assert await asked == "ok"
    assert checker.pid == pid and helper.process.poll() is None


async def test_a_plain_grammar_that_kills_its_helper_is_checked_in_a_child(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_patient() -> None:
        monkeypatch.setattr(module, "CHECKER_SILENT_SECONDS", LONG)

    checker = helpers.checker(on_restart=be_patient)
    await checker.check([schema(PLAIN)], None)
    monkeypatch.setattr(module, "CHECKER_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(module, "is_plain", lambda text: True)  # though it is a bomb
    assert await code_of(checker, schema(PATTERNS)) == "schema_too_complex"


async def test_a_child_takes_the_next_grammar(helpers: Helpers) -> None:
    """One that has answered within its share of the processor waits for it."""
    checker = helpers.checker(
        "helper.GRAMMAR_SHORT_SECONDS = 1",
        f"helper.GRAMMAR_SHORT_MOST_SECONDS = helper.CHECKER_SPARE_SECONDS = {LONG}",
    )

    def children() -> list[int]:
        return children_of(checker.pid)

    texts = map(pattern, ("a+b", "[ab]{2,9}", "(a|bc)*", "c?d"))
    assert await code_of(checker, next(texts)) == "ok"
    seen = children()
    assert len(seen) == 1
    assert await code_of(checker, next(texts)) == "ok"
    assert await code_of(checker, schema({"not": {}})) == "unsupported_schema"
    assert children() == seen
    os.kill(seen[0], signal.SIGKILL)  # while it waits
    assert await code_of(checker, next(texts)) == "ok"
    assert await code_of(checker, schema(PATTERNS)) == "schema_too_complex"
    assert await code_of(checker, next(texts)) == "ok"
    assert not set(seen) & set(children())


async def test_a_child_waits_for_the_next_grammar_for_a_while(checker: ProcessChecker) -> None:
    assert await code_of(checker, pattern("a+b")) == "ok"
    await no_children(checker.pid)


async def test_a_child_that_is_killed_is_a_verdict(helpers: Helpers) -> None:
    checker = helpers.checker(ENDLESS)
    asked = asyncio.create_task(code_of(checker, schema(PATTERNS)))
    while not (checker.pid and children_of(checker.pid)):
        await asyncio.sleep(0.01)
    os.kill(children_of(checker.pid)[0], signal.SIGKILL)
    assert await asked == "schema_too_complex"


async def test_a_child_without_memory_is_a_verdict(helpers: Helpers) -> None:
    """It ends by itself: no limit of time ends it."""
    checker = helpers.checker(ENDLESS, "helper.CHILD_MEMORY = 2**22")
    async with asyncio.timeout(LONG / 10):
        assert await code_of(checker, schema({"const": "x" * 200_000})) == "schema_too_complex"
        assert await code_of(checker, pattern("a")) == "ok"


async def test_a_child_that_gets_no_processor_is_no_verdict(
    helpers: Helpers, tmp_path: Path
) -> None:
    """It has a share of it at first, idle time then, and at last another child has a share."""
    begun, noted = tmp_path / "begun", tmp_path / "noted"
    begun.mkdir()
    checker = helpers.checker(
        *("helper.GRAMMAR_SHORT_MOST_SECONDS = helper.GRAMMAR_IDLE_SECONDS = 0.1",),
        *("helper.GRAMMAR_CHECK_SECONDS = 0.1", "helper.GRAMMAR_STARVED_SECONDS = 0.3"),
        "def wait(*given):",
        f"    open({str(begun)!r} + f'/{{os.getpid()}}', 'w').close()",
        f"    time.sleep({LONG})",
        "helper.judge = wait",
        "end = helper.Helper._end",
        "def noted_end(own, descriptor):",
        "    pid = own._children[descriptor].pid",
        f"    while not os.path.exists({str(begun)!r} + f'/{{pid}}'):",
        "        time.sleep(0.01)",
        "    seen = os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid)",
        f"    print(*seen, file=open({str(noted)!r}, 'a'))",
        "    end(own, descriptor)",
        "helper.Helper._end = noted_end",
    )
    assert await code_of(checker, schema(PATTERNS)) == "queue_full"
    assert checker.pid is not None
    seen = [tuple(map(int, line.split())) for line in noted.read_text().splitlines()]
    policies, nicenesses = zip(*seen, strict=True)
    assert policies == (os.SCHED_IDLE, os.SCHED_OTHER)
    assert min(nicenesses) > os.getpriority(os.PRIO_PROCESS, checker.pid)
    assert len(checker.verdicts) == 0
    await no_children(checker.pid)


def long_form(**fields: Any) -> StructuredOutputs:
    words = [f"{number} of many words" for number in range(300)]
    return StructuredOutputs(json={"properties": {"a": {"enum": words}}, **fields})


async def test_a_long_form_becomes_a_grammar_in_the_helper(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    send = module._Helper.send
    monkeypatch.setattr(
        module._Helper, "send", lambda own, check: (sent.append(check), send(own, check))
    )
    form = long_form(nullable=True)
    made = await asyncio.gather(*(checker.form(form, "schema") for _ in range(3)))
    assert made == [make_grammar(form, "schema")] * 3
    assert made[0].unenforced == ("schema.nullable",)
    assert await checker.form(long_form(nullable=True), "schema") == made[0]
    await checker.check([made[0].text], "schema")
    assert len(sent) == 1
    assert (await checker.form(form, "tools")).unenforced == ("tools.nullable",)
    assert len(sent) == 2


@pytest.mark.parametrize(
    "form",
    [
        long_form(uniqueItems=True),
        long_form(type="strng"),
        long_form(type="object", required=["b"], additionalProperties=False),
        StructuredOutputs(structural_tag="{" * 70),
        StructuredOutputs(json={"const": {1, 2}}),  # offline only: no JSON
        StructuredOutputs(json={"enum": ["x" * 70_000]}),
    ],
    ids=lambda form: str(form)[-40:],
)
async def test_a_form_that_is_refused_in_the_helper(
    checker: ProcessChecker, form: StructuredOutputs
) -> None:
    with pytest.raises(InvalidRequest) as expected:
        await InlineChecker(checker._tokenizer).form(form, "schema")
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            await checker.form(form, "schema")
        assert caught.value.args == expected.value.args


async def test_a_form_whose_grammar_is_refused(helpers: Helpers) -> None:
    judge = "lambda tokenizer, text: helper.Verdict('unsupported', 'why')"
    verdicts: list[str] = []
    checker = helpers.checker(f"helper.judge = {judge}", on_verdict=verdicts.append)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="why") as caught:
            await checker.form(long_form(), "here")
        assert (caught.value.param, caught.value.code) == ("here", "unsupported_schema")
    assert verdicts == ["unsupported"] * 2


async def test_a_form_whose_child_dies(helpers: Helpers) -> None:
    checker = helpers.checker(
        ENDLESS, "helper.make_grammar = lambda *form, **limits: time.sleep(60)"
    )
    asked = asyncio.create_task(checker.form(long_form(), "schema"))
    while not (checker.pid and children_of(checker.pid)):
        await asyncio.sleep(0.01)
    os.kill(children_of(checker.pid)[0], signal.SIGKILL)
    with pytest.raises(InvalidRequest) as caught:
        await asked
    assert (caught.value.param, caught.value.code) == ("schema", "schema_too_complex")


async def test_a_helper_that_does_not_start_fails_what_waits(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MODULE", "rayfin.no_such_module")
    checker = ProcessChecker(tokenizer)
    with pytest.raises(EngineUnavailable, match="cannot be checked now"):
        await checker.check([schema(PLAIN)], None)
    monkeypatch.undo()
    await checker.check([schema(PLAIN)], None)  # at once: it waits for the next start
    checker.close()


async def test_close_ends_all_processes(helpers: Helpers) -> None:
    checker = helpers.checker(ENDLESS)
    await checker.check([schema(PLAIN)], None)
    pid = checker.pid
    asked = asyncio.create_task(checker.check([schema(PATTERNS)], None))
    while not (children := children_of(pid)):
        await asyncio.sleep(0.01)
    checker.close()
    with pytest.raises(EngineUnavailable, match="shuts down"):
        await asked
    await gone(pid, *children)


def test_a_helper_ends_with_its_parent() -> None:
    program = f"""
import asyncio, os, time
from rayfin.deployments.guidance.grammar_check import ProcessChecker
from rayfin.deployments.text.tokenizer import Tokenizer
async def main():
    checker = ProcessChecker(Tokenizer.load({str(DEMO_FOLDER)!r}))
    await checker.check(['start: "a"'], None)
    print(checker.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    asyncio.run(gone(int(run.stdout)))


async def test_the_oldest_verdict_is_forgotten() -> None:
    cache = VerdictCache(size=2)
    one, two, three = map(cache.digest, ("a", "b", "c"))
    cache.put(one, Verdict("ok"))
    cache.put(two, Verdict("invalid", "why"))
    assert cache.get(one) == Verdict("ok")
    cache.put(three, Verdict("ok"))
    assert len(cache) == 2 and cache.get(two) is None and cache.get(one) == Verdict("ok")


def check_of(number: int, tenant: str) -> _Check:
    result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    return _Check(number, "", b"", False, tenant, result)


async def test_tenants_take_turns() -> None:
    queue = CheckQueue()
    for number, tenant in enumerate("aaabbc"):
        assert queue.append(check_of(number, tenant)) is None
    assert [own.number for _ in range(6) if (own := queue.pop())] == [0, 3, 5, 1, 4, 2]
    assert queue.pop() is None and len(queue) == 0


async def test_a_full_queue_refuses_the_tenant_with_most() -> None:
    queue = CheckQueue(size=4)
    many = [check_of(number, "many") for number in range(4)]
    assert [queue.append(own) for own in many] == [None] * 4
    late = check_of(4, "many")
    assert queue.append(late) is late
    other = check_of(5, "other")
    assert queue.append(other) is many[-1]
    assert [own.number for own in queue.drain()] == [0, 1, 2, 5] and queue.pop() is None


async def test_more_unknown_grammars_than_may_wait(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CHILDREN", 0)  # none goes to the helper
    asked = [
        asyncio.create_task(code_of(checker, pattern(f"a{i}"), "many"))
        for i in range(module.MAX_WAITING + 3)
    ]
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    done = {task for task in asked if task.done()}
    assert [task.result() for task in done] == ["queue_full"] * 3
    for task in asked:
        task.cancel()


async def test_a_check_that_has_lost_its_clients_is_not_begun(
    checker: ProcessChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    send = module._Helper.send
    monkeypatch.setattr(
        module._Helper, "send", lambda own, check: (sent.append(check.text), send(own, check))
    )
    monkeypatch.setattr(module, "MAX_CHILDREN", 0)  # none goes to the helper
    left, kept = pattern("left+"), pattern("kept+")
    asked = [asyncio.create_task(code_of(checker, text)) for text in (left, left, kept, kept)]
    await asyncio.sleep(0)
    for task in asked[:3]:
        task.cancel()
    await asyncio.wait(asked[:3])
    assert len(checker._queues[False]) == 1
    monkeypatch.setattr(module, "MAX_CHILDREN", 2)
    assert await code_of(checker, pattern("last+")) == "ok"
    assert await asked[3] == "ok" and sent == [kept, pattern("last+")]
    assert await code_of(checker, left) == "ok"  # asked for again, it is checked


async def test_a_check_without_clients_is_not_begun_again(
    helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = helpers.checker(ENDLESS)
    await checker.check([schema(PLAIN)], None)
    sent = []
    send = module._Helper.send
    monkeypatch.setattr(
        module._Helper, "send", lambda own, check: (sent.append(check.text), send(own, check))
    )
    pid = checker.pid
    assert pid is not None
    asked = asyncio.create_task(code_of(checker, schema(PATTERNS)))
    while not children_of(pid):
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    os.kill(pid, signal.SIGKILL)
    assert await code_of(checker, pattern("next")) == "ok"
    assert checker.pid != pid and sent.count(schema(PATTERNS)) == 1


async def test_memory_is_flat_over_many_grammars(checker: ProcessChecker) -> None:
    def resident() -> int:
        pages = Path(f"/proc/{checker.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    for number in range(50):
        await checker.check([schema({**PLAIN, "title": str(number)})], None)
    before = resident()
    for number in range(50, 250):
        await checker.check([schema({**PLAIN, "title": str(number)})], None)
    assert resident() < before + 8 * 2**20


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (PLAIN, True),
        ({"$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/$defs/a"}}, True),
        ({"$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, False),
        ({"items": {"$ref": "#"}}, False),
        ({"type": "string", "pattern": "a*"}, False),
        ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, True),
        ({"type": "string", "pattern": r"^\d{3}\.x[ab\]]$"}, True),
        ({"type": "string", "pattern": "^(ab|c)$"}, False),
        ({"type": "string", "pattern": "^[ab]{2,3}$"}, False),
        ({"type": "string", "pattern": "^a{40}b{40}$"}, False),
        ({"type": "string", "pattern": "a{3}$"}, False),
        ({"allOf": [PLAIN]}, False),
        ({"enum": ["x" * 5000]}, False),
    ],
)
async def test_which_schemas_are_plain(value: Any, plain: bool) -> None:
    assert is_plain(schema(value)) is plain
    made = make_grammar(StructuredOutputs(json=value), "x") if "enum" not in value else None
    assert made is None or is_plain(made.text) is plain


async def test_open_objects_and_dates_are_plain() -> None:
    dates = {name: {"type": "string", "format": name} for name in ("date", "time", "date-time")}
    outputs = StructuredOutputs(json={"type": "object", "properties": dates})
    assert is_plain(make_grammar(outputs).text)


async def test_texts_to_choose_from_are_plain() -> None:
    assert is_plain(make_grammar(StructuredOutputs(choice=['a "b"', "c\n", "d\\"])).text)
    assert not is_plain('start: "a" | b\nb: "c"') and not is_plain(pattern("a"))


async def test_in_the_callers_process(tokenizer: Tokenizer) -> None:
    checker = InlineChecker(tokenizer)
    await checker.check([schema(PLAIN), pattern("a+")], None)
    with pytest.raises(InvalidRequest) as caught:
        checker.check_now([schema({"not": {}})], "schema")
    assert (caught.value.param, caught.value.code) == ("schema", "unsupported_schema")


def children_of(pid: int | None) -> list[int]:
    return [int(own) for own in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def no_children(pid: int | None) -> None:
    """Waits until the helper has reaped what it has ended."""
    async with asyncio.timeout(LONG / 10):
        while children_of(pid):
            await asyncio.sleep(0.02)


async def gone(*pids: int | None) -> None:
    """Waits until no process has one of the ids; one that has ended and is not reaped has."""
    async with asyncio.timeout(LONG / 10):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.02)
