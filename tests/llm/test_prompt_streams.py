"""The streams of several prompts, merged."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from jpaged.frontend.prompt_streams import AT_ONCE, merge_streams

COUNT = 10 * AT_ONCE


class Streams:
    """Streams of `COUNT` prompts. Each yields its index and the number of the output."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.may_end = asyncio.Event()

    async def one(self, index: int) -> AsyncGenerator[tuple[int, int], None]:
        self.begun += 1
        try:
            for number in range(3):
                yield index, number
            await self.may_end.wait()
        finally:
            self.ended += 1

    async def watch(self, longest: list[int]) -> None:
        """Note how many streams begin, and how many end, between two turns of the event loop."""
        while True:
            before = self.begun, self.ended
            await asyncio.sleep(0)
            longest[:] = map(max, longest, (self.begun - before[0], self.ended - before[1]))


def test_all_outputs_arrive_and_no_turn_of_the_loop_is_long():
    async def main() -> None:
        streams, longest, got = Streams(), [0, 0], []
        watcher = asyncio.create_task(streams.watch(longest))
        async with aclosing(merge_streams([streams.one(index) for index in range(COUNT)])) as merged:
            async for index, output in merged:
                assert output[0] == index
                got.append(output)
                if len(got) == 3 * COUNT:
                    break
        assert sorted(got) == [(index, number) for index in range(COUNT) for number in range(3)]
        assert streams.begun == streams.ended == COUNT
        watcher.cancel()
        assert max(longest) <= 2 * AT_ONCE

    asyncio.run(main())


@pytest.mark.parametrize("begins", [True, False])
def test_an_error_ends_all_streams_and_is_raised_once(begins: bool):
    async def fails() -> AsyncGenerator[Any, None]:
        if begins:
            yield 0
        raise ValueError("no")

    async def main() -> None:
        streams, complaints = Streams(), []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        some = [streams.one(index) for index in range(COUNT)]
        with pytest.raises(ValueError, match="no"):
            async for _ in merge_streams([some[0], fails(), fails(), *some[1:]]):
                pass
        assert streams.begun == streams.ended
        assert begins or streams.begun < COUNT, "the last ones need not begin"
        gc.collect()
        await asyncio.sleep(0)
        assert not complaints

    asyncio.run(main())
