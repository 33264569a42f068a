"""The model that answers, and how another takes over from it: it is loaded first, then all new requests go to it, and
the one before it is removed when it has given its last answer. No request is lost and none waits."""

import asyncio
import sys
from collections.abc import Callable
from typing import Protocol

from m3diff.records.errors import DataError
from m3diff.registry.model_source import Source
from m3diff.serving.asked import Asked
from m3diff.serving.metrics import Metrics, say
from m3diff.serving.replica import Answer, Facts, Undecodable, Unloadable


class Deployed(Protocol):
    """A model that is loaded, in replicas or in this process."""

    async def facts(self) -> Facts | Unloadable: ...

    async def ask(self, asked: Asked) -> Answer | Undecodable: ...

    async def remove(self) -> None: ...


Deploy = Callable[[Source], Deployed]
"""Loads a checkpoint; blocks until it is ready."""


class Served:
    """A model with its facts, and how many requests it still has to answer."""

    def __init__(self, deployed: Deployed, facts: Facts) -> None:
        self.deployed, self.facts = deployed, facts
        self.under_way = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def ask(self, asked: Asked) -> Answer | Undecodable:
        self.under_way += 1
        self.idle.clear()
        try:
            return await self.deployed.ask(asked)
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()


class Models:
    """`current` is None until the first model is ready."""

    def __init__(self, deploy: Deploy, metrics: Metrics) -> None:
        self.deploy, self.metrics = deploy, metrics
        self.current: Served | None = None
        self.removing: set[asyncio.Task[None]] = set()

    async def switch(self, source: Source) -> None:
        """Load a model, let it answer from now on, and remove the one before when it is idle.

        Raises:
            DataError: its checkpoint is damaged; the one before stays.
        """
        deployed = await asyncio.to_thread(self.deploy, source)
        facts = await deployed.facts()
        if isinstance(facts, Unloadable):
            await deployed.remove()
            raise DataError(facts.why)
        before, self.current = self.current, Served(deployed, facts)
        self.metrics.serves(self.current.facts.name)
        if before is not None:
            task = asyncio.create_task(_retire(before))
            self.removing.add(task)
            task.add_done_callback(self.removing.discard)

    async def follow(self, version: Callable[[], str], find: Callable[[], Source], poll_s: float) -> None:
        """Look again and again at where the alias points, and switch where it moved. What fails is said and tried
        again at the next look; the model that is there goes on answering.

        Args:
            version: the name of the version that the alias names at the moment.
            find: its checkpoint.
        """
        failed = ""
        while True:
            await asyncio.sleep(poll_s)
            assert self.current is not None
            try:
                if await asyncio.to_thread(version) != self.current.facts.name:
                    source = await asyncio.to_thread(find)
                    await self.switch(source)
                    say(f"answers now with {source.name}")
                failed = ""
            except Exception as error:  # of MLflow, of a checkpoint, of Ray
                self.metrics.poll_failures.inc()
                if str(error) != failed:
                    told = f"goes on with {self.current.facts.name}; the next version could not be had: {error}"
                    say(told, sys.stderr)
                failed = str(error)

    async def close(self) -> None:
        """Wait for models that are on their way out, and remove the current one."""
        if self.removing:
            await asyncio.wait(self.removing)
        if self.current is not None:
            current, self.current = self.current, None
            await current.deployed.remove()


async def _retire(served: Served) -> None:
    await served.idle.wait()
    await served.deployed.remove()
