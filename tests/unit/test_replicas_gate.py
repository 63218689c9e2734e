"""The gate of an engine: many together, or one alone."""

from __future__ import annotations

import asyncio

from hosted_tinker.replicas.gate import Gate


async def hold(gate: Gate, log: list[str], name: str, *, alone: bool, leave: asyncio.Event) -> None:
    async with gate.enter(lambda: alone):
        log.append(f"+{name}")
        await leave.wait()
        log.append(f"-{name}")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_that_is_alone_waits_for_the_others_and_holds_up_those_after_it() -> None:
    async def run() -> list[str]:
        gate, log = Gate(), []
        leave = {name: asyncio.Event() for name in "abcde"}
        tasks = []
        for name, alone in (("a", False), ("b", False), ("c", True), ("d", False), ("e", True)):
            tasks.append(asyncio.create_task(hold(gate, log, name, alone=alone, leave=leave[name])))
            await settle()
        for name in "abcde":
            leave[name].set()
            await settle()
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(run()) == ["+a", "+b", "-a", "-b", "+c", "-c", "+d", "-d", "+e", "-e"]


def test_one_that_gives_up_waiting_lets_the_others_in() -> None:
    async def run() -> list[str]:
        gate, log = Gate(), []
        leave = asyncio.Event()
        first = asyncio.create_task(hold(gate, log, "a", alone=False, leave=leave))
        await settle()
        waiting = asyncio.create_task(hold(gate, log, "b", alone=True, leave=leave))
        await settle()
        waiting.cancel()
        await settle()
        third = asyncio.create_task(hold(gate, log, "c", alone=False, leave=leave))
        await settle()
        leave.set()
        await asyncio.gather(first, third)
        return log

    assert asyncio.run(run())[:2] == ["+a", "+c"]


def test_whether_it_must_be_alone_is_asked_when_its_turn_comes() -> None:
    async def run() -> list[str]:
        gate, log = Gate(), []
        leave = {name: asyncio.Event() for name in "abc"}
        must_be_alone = False

        async def score() -> None:
            async with gate.enter(lambda: must_be_alone):
                log.append("+score")

        first = asyncio.create_task(hold(gate, log, "a", alone=True, leave=leave["a"]))
        await settle()
        second = asyncio.create_task(hold(gate, log, "b", alone=False, leave=leave["b"]))
        scoring = asyncio.create_task(score())
        await settle()
        must_be_alone = True
        leave["a"].set()
        await settle()
        assert log == ["+a", "-a", "+b"]
        leave["b"].set()
        await asyncio.gather(first, second, scoring)
        return log

    assert asyncio.run(run())[-2:] == ["-b", "+score"]
