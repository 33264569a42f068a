"""Distinguish a slow server from one that hangs."""

import threading
from collections.abc import Callable

CONCURRENT_QUESTIONS = 8


class SilenceWatch:
    """Ends a run if the server hangs, by counting consecutive questions that got no answer in time.

    After such a question, the next question is sent only when an answer has arrived or when no other question is in
    flight. Otherwise every free thread would wait for the full time limit although the server hangs.

    Args:
        report_silence: called when the first attempt of the run gets no answer in time.

    Attributes:
        unanswered: number of questions without an answer in time since the last answer.
        stopped: whether the run must end. No more questions are asked then.
    """

    def __init__(self, report_silence: Callable[[], None]) -> None:
        self.condition = threading.Condition()
        self.report_silence = report_silence
        self.has_reported = False
        self.unanswered = 0
        self.under_way = 0
        self.stopped = False

    def begin(self) -> bool:
        """Wait until a question may be asked. Return False if the run must end."""
        with self.condition:
            self.condition.wait_for(lambda: self.stopped or not (self.unanswered and self.under_way))
            self.under_way += not self.stopped
            return not self.stopped

    def end(self, is_answered: bool) -> None:
        """Record the outcome of a question. After CONCURRENT_QUESTIONS in a row without an answer, the run must end."""
        with self.condition:
            self.under_way -= 1
            self.unanswered = 0 if is_answered else self.unanswered + 1
            self.stopped |= self.unanswered >= CONCURRENT_QUESTIONS
            self.condition.notify_all()

    def note(self) -> None:
        """Record an attempt that got no answer in time. The first such attempt of the run is reported."""
        with self.condition:
            is_first = not self.has_reported
            self.has_reported = True
        if is_first:
            self.report_silence()

    def stop(self) -> None:
        """End the run. Waiting questions are not asked."""
        with self.condition:
            self.stopped = True
            self.condition.notify_all()
