"""Notices, each sent once: a failure, a crash, a rejection, a promotion.

`M3DIFF_NOTIFY` says where to: an address of Apprise (`mailto://...`, `json://...`, `slack://...`) or a notification
block of Prefect (`slack-webhook/mine`). Without it nobody is told. What could not be sent is kept in `runs/flows/`, and
sent at the next occasion; it fails no run. The address may hold a password, so neither it nor its errors are logged.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.blocks.notifications import AppriseNotificationBlock
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.states import State
from prefect.utilities.urls import url_for
from pydantic import SecretStr

from flows.report import Done
from flows.workspace import FLOWS, KEPT_DAYS, lock, read_json
from m3diff.records.errors import redacted
from m3diff.records.files import write_atomic

NOTIFY = "M3DIFF_NOTIFY"
REMEMBERED = 1000  # notices, so that each is told once
EXCEPTION = "Flow run encountered an exception: "  # Prefect's words before those of the error
MOST_WORDS = 400  # characters of an error


def tell(
    log: Callable[[str], None], key: str = "", title: str = "", text: str = "", checkout: Path | None = None
) -> None:
    """Send a notice, unless one of this key was sent before, after those that wait; without a key, these alone.
    Whatever goes wrong is logged, and nothing fails. Without an address nothing waits.

    Args:
        checkout: the folder that the flow was started in; without one the current directory.
    """
    address = os.environ.get(NOTIFY, "").strip()
    try:
        with kept(checkout or Path.cwd()) as notices:
            waiting = notices["waiting"]
            if key and key not in notices["told"]:
                waiting[key] = [title, redacted(text)]
            for key, (title, text) in [*waiting.items()]:
                try:
                    if address:
                        send(address, title, text)
                        notices["told"][key] = datetime.now(UTC).isoformat(timespec="seconds")
                except Exception as error:
                    log(
                        f"warning: {title}: nobody was told, for {NOTIFY} does not work ({type(error).__name__}); "
                        f"{len(waiting)} notice(s) wait for the next occasion"
                    )
                    break
                del waiting[key]
    except Exception as error:
        log(f"warning: a notice was not sent: {type(error).__name__}")


@contextmanager
def kept(checkout: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Open the notices that were sent (key: when) and that wait (key: title and text); other processes wait."""
    folder = checkout / FLOWS
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "notices.lock"):
        notices = read_json(folder / "notices.json") or {"told": {}, "waiting": {}}
        before = json.dumps(notices)
        yield notices
        notices["told"] = dict([*notices["told"].items()][-REMEMBERED:])
        if (after := json.dumps(notices)) != before:
            write_atomic(folder / "notices.json", after)


def send(address: str, title: str, text: str) -> None:
    """Send a notice to an address of Apprise, or by a block of Prefect's. Any exception: it was not sent."""
    apprise = logging.getLogger("apprise")
    before, apprise.disabled = apprise.disabled, True  # it logs addresses
    try:
        if "://" in address:
            block: Any = AppriseNotificationBlock(url=SecretStr(address))
        else:
            block = Block.load(address)
            if not isinstance(block, NotificationBlock):
                raise TypeError("no notification block")
        with block.raise_on_failure():
            block.notify(text, subject=title)
    finally:
        apprise.disabled = before


def forget(prefix: str, checkout: Path) -> None:
    """Allow notices whose keys begin so to be sent again: their cause is over."""
    with kept(checkout) as notices:
        for group in notices.values():
            for key in [key for key in group if key.startswith(prefix)]:
                del group[key]


def failed(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """A hook of the flows, for failures and crashes."""
    tell_of_end(flow.fn.__name__, flow_run, state, get_logger("m3diff").warning)


def tell_of_end(
    what: str, run: FlowRun, state: State, log: Callable[[str], None], checkout: Path | None = None
) -> None:
    """Tell of a failure or crash in one paragraph: what, which run, why, where to look, what to do. A look that fails
    again and again is told once.

    Args:
        what: the deployment: full, retrain or watch.
    """
    how, why = "crashed" if state.is_crashed() else "failed", reason_of(state)
    key = f"watch {why}" if what == "watch" and how == "failed" else f"{run.id} {how}"
    if what == "watch":
        then = "It looks again by its schedule; what it could read was taken up."
    elif how == "crashed":
        then = "It is started again by itself and goes on where it was killed, unless it crashed three times in a row."
    else:
        then = (
            f"Its page says what failed, its worktree {FLOWS}/{run.id} stays for {KEPT_DAYS} days. Once the cause is "
            f"gone: `prefect deployment run m3diff/{what}`."
        )
    text = f"Run {run.name!r} of m3diff/{what} {why}. {link(run.id)}{then}"
    tell(log, key, f"m3diff/{what} {how}", text, checkout)


def reason_of(state: State) -> str:
    """The state of a run that ended and the first line of its error; for a stage also its last line of output."""
    first, *lines = (state.message or "").removeprefix(EXCEPTION).splitlines() or [""]
    said = [line.strip() for line in lines if line.strip() and not line.startswith("ERROR: failed to reproduce")]
    return f"{(state.name or '').lower()}: {' '.join([first, *said[-1:]])[:MOST_WORDS]}"


def link(flow_run: object) -> str:
    """The address of a run's page, with a full stop and a blank; nothing without a server."""
    address = url_for("flow-run", obj_id=str(flow_run))
    return f"{address} . " if address else ""


def decided(done: Done, log: Callable[[str], None]) -> None:
    """Tell of a model that the gate rejected or promoted; of a run that changed nothing there is nothing to tell."""
    decision = done.decision
    if decision is None or decision.outcome == "unchanged":
        return
    word = "rejected" if decision.outcome == "refused" else "promoted"
    if word == "promoted":
        number = decision.champion if decision.champion is not None else "none"
        then = f"The champion before was {number}; `m3diff rollback --why TEXT` brings it back."
    elif decision.champion is None:
        then = "There is no champion: choose one as said above."
    else:
        then = f"The champion is as before (version {decision.champion}); there is nothing to do."
    because = f"Run because {'; '.join(done.reasons)}. " if done.reasons else ""
    text = f"{decision}. {because}{link(done.work.flow_run)}{then}"
    tell(log, f"{done.work.flow_run} {word}", f"m3diff: a model was {word}", text, done.work.checkout)
