"""Distinguish a slow server from one that hangs."""

import threading
from collections.abc import Callable

CONCURRENT_QUESTIONS = 8


class SilenceWatch:
    """End a run if the server hangs. Consecutive questions that got no answer in time are counted.

    After such a question, the next question is sent only when an answer has arrived or when no other question is in
    flight. Otherwise every free thread would wait for the full time limit although the server hangs.

    Args:
        report_silence: called when the first attempt of the run gets no answer in time.

    Attributes:
        consecutive_silences: number of questions without an answer in time since the last answer.
        is_stopped: whether the run must end. No more questions are asked then.
    """

    def __init__(self, report_silence: Callable[[], None]) -> None:
        self.condition = threading.Condition()
        self.report_silence = report_silence
        self.has_reported = False
        self.consecutive_silences = 0
        self.questions_in_flight = 0
        self.is_stopped = False

    def begin_question(self) -> bool:
        """Wait until a question may be asked. Return False if the run must end."""
        with self.condition:
            self.condition.wait_for(self._may_go_on)
            if self.is_stopped:
                return False
            self.questions_in_flight += 1
            return True

    def _may_go_on(self) -> bool:
        """Return whether the next question may be sent, or the run must end."""
        is_waiting_for_answer = self.consecutive_silences > 0 and self.questions_in_flight > 0
        return self.is_stopped or not is_waiting_for_answer

    def end_question(self, is_answered: bool) -> None:
        """Record the outcome of a question. After CONCURRENT_QUESTIONS in a row without an answer, the run must end."""
        with self.condition:
            self.questions_in_flight -= 1
            self.consecutive_silences = 0 if is_answered else self.consecutive_silences + 1
            if self.consecutive_silences >= CONCURRENT_QUESTIONS:
                self.is_stopped = True
            self.condition.notify_all()

    def record_silence(self) -> None:
        """Record an attempt that got no answer in time. The first such attempt of the run is reported."""
        with self.condition:
            is_first = not self.has_reported
            self.has_reported = True
        if is_first:
            self.report_silence()

    def stop(self) -> None:
        """End the run. Waiting questions are not asked."""
        with self.condition:
            self.is_stopped = True
            self.condition.notify_all()
