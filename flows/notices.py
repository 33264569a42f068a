"""What somebody should know, told once: a failure, a crash, a rejection, a promotion, and silence.

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


def tell(key: str, title: str, text: str, log: Callable[[str], None], checkout: Path | None = None) -> None:
    """Send a notice, unless one of this key was sent before. Whatever goes wrong is logged, and nothing fails.

    Args:
        checkout: the folder that the flow was started in; without one the current directory.
    """
    try:
        with kept(checkout or Path.cwd()) as notices:
            if key not in notices["told"]:
                notices["waiting"][key] = [title, redacted(text)]
            send_waiting(notices, log)
    except Exception as error:
        log(f"warning: a notice was not sent: {type(error).__name__}")


@contextmanager
def kept(checkout: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """What was told (key: when) and what waits (key: title and text), to be changed within; other processes wait."""
    folder = checkout / FLOWS
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "notices.json"
    with lock(folder / "notices.lock"):
        notices = read_json(file) or {"told": {}, "waiting": {}}
        before = json.dumps(notices)
        yield notices
        notices["told"] = dict([*notices["told"].items()][-REMEMBERED:])
        if (after := json.dumps(notices)) != before:
            write_atomic(file, after)


def send_again(checkout: Path, log: Callable[[str], None]) -> None:
    """Send what could not be sent before."""
    with kept(checkout) as notices:
        send_waiting(notices, log)


def send_waiting(notices: dict[str, dict[str, Any]], log: Callable[[str], None]) -> None:
    """Send what waits, oldest first, until one cannot be sent. Without an address nothing waits."""
    address = os.environ.get(NOTIFY, "").strip()
    if not address:
        notices["waiting"].clear()
        return
    for key, (title, text) in [*notices["waiting"].items()]:
        try:
            send(address, title, text)
        except Exception as error:
            log(
                f"warning: {title}: nobody was told, for {NOTIFY} does not work ({type(error).__name__}); "
                f"{len(notices['waiting'])} notice(s) wait for the next occasion"
            )
            return
        del notices["waiting"][key]
        notices["told"][key] = datetime.now(UTC).isoformat(timespec="seconds")


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
    """What is over may be told again: the keys that begin so."""
    with kept(checkout) as notices:
        for group in notices.values():
            for key in [key for key in group if key.startswith(prefix)]:
                del group[key]


def failed(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """A hook of the flows, for failures and crashes. A look that fails again and again is told once."""
    what, why = flow.fn.__name__, reason_of(state)
    how = "crashed" if state.is_crashed() else "failed"
    tell(
        f"watch {why}" if what == "watch" else f"{flow_run.id} {how}",
        f"m3diff/{what} {how}",
        failure(what, flow_run, state),
        get_logger("m3diff").warning,
    )


def tell_of_end(what: str, run: FlowRun, state: State, log: Callable[[str], None], checkout: Path) -> None:
    """What the run's own hook would have told, where it could not: its process or its host was gone."""
    how = "crashed" if state.is_crashed() else "failed"
    tell(f"{run.id} {how}", f"m3diff/{what} {how}", failure(what, run, state), log, checkout)


def failure(what: str, run: FlowRun, state: State) -> str:
    """One paragraph: what, which run, why, where to look, what to do.

    Args:
        what: the deployment: full, retrain or watch.
    """
    if what == "watch":
        then = "It looks again by its schedule; what it could read was taken up."
    elif state.is_crashed():
        then = "It is started again by itself and goes on where it was killed, unless it crashed three times in a row."
    else:
        then = (
            f"Its page says what failed, its worktree {FLOWS}/{run.id} stays for {KEPT_DAYS} days. Once the cause is "
            f"gone: `prefect deployment run m3diff/{what}`."
        )
    return f"Run {run.name!r} of m3diff/{what} {reason_of(state)}. {link(run.id)}{then}"


def reason_of(state: State) -> str:
    """How a run ended, and the first line of its error; of a stage also what it said last."""
    lines = (state.message or "").removeprefix(EXCEPTION).splitlines() or [""]
    said = [line.strip() for line in lines[1:] if line.strip() and not line.startswith("ERROR: failed to reproduce")]
    why = " ".join([lines[0], *said[-1:]])
    return f"{(state.name or '').lower()}: {why[:MOST_WORDS]}"


def link(flow_run: object) -> str:
    """The address of a run's page, with a full stop and a blank; nothing without a server."""
    address = url_for("flow-run", obj_id=str(flow_run))
    return f"{address} . " if address else ""


def decided(done: Done, log: Callable[[str], None]) -> None:
    """Tell of a model that the gate rejected or promoted; of a run that changed nothing there is nothing to tell."""
    decision = done.decision
    if decision is None or decision.outcome == "unchanged":
        return
    number = decision.champion if decision.champion is not None else "none"
    if decision.outcome == "refused":
        word, then = "rejected", f"The champion is as before (version {number}); there is nothing to do."
        if decision.champion is None:
            then = "There is no champion: choose one as said above."
    else:
        word, then = "promoted", f"The champion before was {number}; `m3diff rollback --why TEXT` brings it back."
    because = f"Run because {'; '.join(done.reasons)}. " if done.reasons else ""
    text = f"{decision}. {because}{link(done.work.flow_run)}{then}"
    tell(f"{done.work.flow_run} {word}", f"m3diff: a model was {word}", text, log, done.work.checkout)
