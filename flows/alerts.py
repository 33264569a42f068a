"""Send alerts of failures, crashes, rejections and promotions.

Alerts are sent to the Apprise URL in `M3DIFF_NOTIFY` (`mailto://...`, `json://...`, `slack://...`). If the variable is
not set, no alerts are sent. Each alert is sent once. If sending fails, the run continues, and the alert is kept in
`runs/flows/` and sent with the next one. The URL may contain a password, so neither the URL nor errors about it are
logged.

These places send alerts. An alert about another event needs a function here, and a call in the place that sees the
event:

- `HOOKS` in `pipeline.py` and the decorator of `watch` in `watch.py`: Prefect calls `alert_failure` if a flow fails or
  crashes while its process is alive.
- `run_in_workspace` in `pipeline.py`: `alert_decision` if the gate rejected or promoted a model.
- `Worker.alert_lost_run` in `worker.py`: `alert_end` if the process of a run was killed, so that no hook ran.
- `watch` in `watch.py`: `send_alert` without a key, which sends the alerts that are still waiting.
"""

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from apprise import Apprise
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.states import State
from prefect.utilities.urls import url_for

from flows.report import RunRecord
from flows.workspace import FLOWS_FOLDER, KEPT_DAYS, hold_lock, read_json
from m3diff.records.errors import format_count, redact
from m3diff.records.files import write_atomic

NOTIFY_VARIABLE = "M3DIFF_NOTIFY"
MAX_REMEMBERED = 1000  # number of sent alerts to remember, so that no alert is sent twice
EXCEPTION_PREFIX = "Flow run encountered an exception: "  # prefix that Prefect adds to an error
FAILED_STAGE_PREFIX = "ERROR: failed to reproduce"  # start of DVC's last line, which only repeats the name of the stage
MAX_ERROR_CHARS = 400
REFUSED_PREFIX = "Refused"  # start of a state's name if the run could not start, followed by the cause


def send_alert(
    log: Callable[[str], None], key: str = "", title: str = "", text: str = "", checkout: Path | None = None
) -> None:
    """Send the alerts that are waiting, then this alert. Skip it if an alert with the same key was already sent.

    Errors are logged and never raised. If no URL is set, alerts are discarded.

    Args:
        log: called with a message if an alert cannot be sent.
        key: the key that identifies the alert. If it is empty, only the waiting alerts are sent.
        title: the title of the alert.
        text: the text of the alert.
        checkout: the folder in which the flow was started, by default the current directory.
    """
    folder = (checkout or Path.cwd()) / FLOWS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / "alerts.lock"):
            alerts = read_json(folder / "alerts.json") or {"sent": {}, "waiting": {}}
            if key and key not in alerts["sent"]:
                alerts["waiting"][key] = [title, redact(text)]
            send_waiting_alerts(alerts["sent"], alerts["waiting"], log)
            write_atomic(folder / "alerts.json", json.dumps(alerts))
    except Exception as error:
        log(f"warning: an alert was not sent: {type(error).__name__}")


def send_waiting_alerts(
    sending_times: dict[str, str], waiting_alerts: dict[str, list[str]], log: Callable[[str], None]
) -> None:
    """Send the waiting alerts in order, until one cannot be sent.

    Args:
        sending_times: the time at which each alert was sent, by its key. Updated in place.
        waiting_alerts: the title and text of each waiting alert, by its key. Updated in place.
        log: called with a message if an alert cannot be sent.
    """
    address = os.environ.get(NOTIFY_VARIABLE, "").strip()
    for key, (title, text) in list(waiting_alerts.items()):
        if address and not send(address, title, text):
            log(
                f"warning: {title}: the alert was not sent, because {NOTIFY_VARIABLE} does not work. "
                f"{format_count(len(waiting_alerts), 'alert is', 'alerts are')} kept and sent with the next one"
            )
            return
        if address:
            sending_times[key] = datetime.now(UTC).isoformat(timespec="seconds")
        del waiting_alerts[key]
    for key in list(sending_times)[:-MAX_REMEMBERED]:
        del sending_times[key]


def send(address: str, title: str, text: str) -> bool:
    """Send an alert with Apprise and return whether it was accepted."""
    logger = logging.getLogger("apprise")
    was_disabled = logger.disabled
    logger.disabled = True  # it logs URLs, which may contain a password
    try:
        recipient = Apprise()
        return recipient.add(address) and bool(recipient.notify(text, title=title))
    finally:
        logger.disabled = was_disabled


def alert_failure(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Send an alert of a failure or crash. Prefect calls this function when a flow fails or crashes."""
    alert_end(flow.fn.__name__, flow_run, state, get_logger("m3diff").warning)


def alert_end(deployment: str, run: FlowRun, state: State, log: Callable[[str], None]) -> None:
    """Send an alert of a failure or crash that names the run, the reason, where to look and what to do.

    If `watch` keeps failing for the same reason, only one alert per day is sent.

    Args:
        deployment: the name of the deployment: full, retrain or watch.
        run: the flow run.
        state: the final state of the run.
        log: called with a message if the alert cannot be sent.
    """
    outcome = "crashed" if state.is_crashed() else "failed"
    reason = format_reason(state)
    key = f"{run.id} {outcome}"
    if deployment == "watch" and outcome == "failed":
        key = f"watch {reason} {datetime.now(UTC).date()}"
    next_step = (
        f"Its page shows what failed. Its worktree {FLOWS_FOLDER}/{run.id} is kept for {KEPT_DAYS} days. After you fix "
        f"the cause, run `prefect deployment run m3diff/{deployment}`."
    )
    if is_refused(state):
        next_step = f"Nothing was started. After you fix the cause, run `prefect deployment run m3diff/{deployment}`."
    if outcome == "crashed":
        next_step = (
            "It restarts automatically and continues where it was killed, unless it crashed three times in a row."
        )
    text = f"Run {run.name!r} of m3diff/{deployment} {reason}. {format_link(run.id)}{next_step}"
    send_alert(log, key, f"m3diff/{deployment} {outcome}", text)


def is_refused(state: State) -> bool:
    """Return whether a state means that the run could not start (see `flows.pipeline.refuse_run`)."""
    return (state.name or "").startswith(REFUSED_PREFIX)


def format_reason(state: State) -> str:
    """Return the reason for a failure: the state's name, the error's first line and the last line of output, if any."""
    message = (state.message or "").removeprefix(EXCEPTION_PREFIX)
    first_line, *other_lines = message.splitlines() or [""]
    reason = first_line
    output = [line.strip() for line in other_lines if line.strip() and not line.startswith(FAILED_STAGE_PREFIX)]
    if output:
        reason += f" {output[-1]}"
    name = (state.name or "").partition(":")[0].lower()
    return f"{name}: {reason[:MAX_ERROR_CHARS]}"


def format_link(flow_run: object) -> str:
    """Return the URL of a run's page, followed by ` . ` to continue a text. Return an empty string without a server."""
    address = url_for("flow-run", obj_id=str(flow_run))
    return f"{address} . " if address else ""


def alert_decision(record: RunRecord, log: Callable[[str], None]) -> None:
    """Send an alert if the gate rejected or promoted a model."""
    decision = record.decision
    if decision is None or decision.outcome == "unchanged":
        return
    champion = "none" if decision.champion is None else decision.champion
    outcome = "promoted"
    consequence = f"The previous champion was {champion}. To restore it, run `m3diff rollback --why TEXT`."
    if decision.outcome == "refused":
        outcome = "rejected"
        consequence = f"The champion is unchanged: {champion}."
    work = record.work
    reasons = f"The run was started because {'; '.join(record.reasons)}. " if record.reasons else ""
    text = f"{decision}. {reasons}{format_link(work.flow_run)}{consequence}"
    send_alert(log, f"{work.flow_run} {outcome}", f"m3diff: a model was {outcome}", text, work.checkout)
