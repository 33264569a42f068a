"""Send questions to an endpoint, several at a time, and cache every answer immediately.

Repeating a finished run sends no questions, and repeating a killed run continues it. An answer belongs to the server
that gave it. A server is identified by its URL and by what `GET /v1/models` reports about the model. Answers from
another server are used only if the user allows it.

If a server rejects a question temporarily (429) or fails (5xx), the question is sent again after the time that the
server specifies. If no answer arrives in time, the question is sent once more. The run ends when CONCURRENT_QUESTIONS
consecutive questions have got no answer in time. A rejected question (400, 413, 422) counts as refused if the server
answered other questions of the same run. The key is read from an environment variable and is never written to a file.
"""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.endpoint.answers import (
    AnswerSource,
    AnswerStore,
    EndpointAnswer,
    StoredAnswer,
    count_answers_by_server,
    describe_cache,
    other_server_error,
)
from m3diff.endpoint.questions import EndpointQuestion, data_url, replace_surrogates
from m3diff.endpoint.replies import read_answer
from m3diff.endpoint.servers import ServerIdentity, identity_in_list
from m3diff.endpoint.silence import CONCURRENT_QUESTIONS, SilenceWatch
from m3diff.endpoint.transport import EndpointError, RedirectError, describe_error, http_client, redirect_error
from m3diff.endpoint.url import normalised_url, on_this_machine
from m3diff.records.errors import Fault
from m3diff.records.files import sha256
from m3diff.records.progress import progress
from m3diff.records.sample import Turn
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    import openai

RETRIES = 5  # for requests that are rejected temporarily or fail; openai waits as long as the server asks

# Maximum number of questions in the thread pool at a time. Each question takes 2 kB
WINDOW = 32 * CONCURRENT_QUESTIONS

REJECTED_STATUSES = (400, 413, 422)  # the cause is the question or its form
RETRY_STATUSES = (408, 409, 425, 429)

# Maximum number of times that a question is sent if no answer arrives in time. It is lower than RETRIES because a
# server that hangs would hang each time.
ATTEMPTS = 2

CONNECT_S = 10  # connect timeout; a running server accepts connections immediately, however slowly it answers
IDENTIFY_S = 10  # timeout for the list of models, which needs no computation

MAX_QUESTION_CHARS = 60  # maximum number of characters of a question in a message

REUSE_OPTION = Fault("endpoint.reuse_in_section")


class Endpoint:
    """A model behind an endpoint, with a cache of its answers.

    Args:
        url: URL up to and including `/v1`.
        key_variable: environment variable that holds the key. It need not be set if the server does not require a key.
        timeout_s: time limit for one question, in seconds.
        store: file of the cache. Several models may share it.
        max_tokens: maximum length of an answer, in tokens; None uses the server's default.
        reuse: what to do with cached answers that may come from another server. None: raise OtherServerError; True: use
            them; False: ask this server and keep both answers.
        option: how the user can set `reuse`, for the message of OtherServerError.

    Attributes:
        answers: the cache.
        used_answers: the answers that `ask` has returned so far, by the key of their question.
        sources: the servers of the answers that the last call of `ask` returned.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key_variable: str,
        timeout_s: float,
        store: Path,
        max_tokens: int | None = None,
        reuse: bool | None = None,
        option: Fault | str = REUSE_OPTION,
    ) -> None:
        self.url = url
        self.model = model
        self.key_variable = key_variable
        self.timeout_s = timeout_s
        self.max_tokens = max_tokens
        self.reuse = reuse
        self.option = option
        self.answers = AnswerStore(store)
        self.used_answers: dict[str, StoredAnswer] = {}
        self.sources: list[AnswerSource] = []

    def ask(self, questions: Sequence[EndpointQuestion], task: str) -> list[EndpointAnswer]:
        """Return the answer to each question, in order.

        If all answers are cached, the server is not contacted at all, unless `reuse` is False. If cached answers are
        used, a line with their number is printed.

        Args:
            task: name of the work, for the progress bar.

        Raises:
            OtherServerError: cached answers may come from another server, and `reuse` is None.
            ParamsError: the endpoint rejects the key, the model or the form of the questions.
            EndpointError: the endpoint cannot be reached, keeps failing, or does not answer in time. Answers received
                before that are cached.
        """
        keys = [self.key(question) for question in questions]
        questions_by_key = dict(zip(keys, questions, strict=True))  # each question once
        server = self._server_without_request(questions_by_key)
        if server is None:
            cached_answers = self._ask_new_questions(questions_by_key, task)
        else:
            cached_answers = self._select_cached_answers(questions_by_key, server)
        self.used_answers |= cached_answers
        answers = [self.used_answers[key] for key in keys]
        self.sources = count_answers_by_server(answers, [key in cached_answers for key in keys])
        if cached_answers:
            print(f"{task}: {describe_cache(self.sources, self.answers.path)}", flush=True)
        return [stored.answer for stored in answers]

    def _ask_new_questions(self, questions: Mapping[str, EndpointQuestion], task: str) -> dict[str, StoredAnswer]:
        """Ask the questions that are not cached and add their answers to `used_answers`. Return the cached answers."""
        self._check_urls_of_answers(questions)
        with self._client() as client:
            server = self._identify_or_reuse(client, questions)
            cached_answers = self._select_cached_answers(questions, server)
            new_questions = {key: question for key, question in questions.items() if key not in cached_answers}
            if new_questions:
                has_answered = any(stored.server == server for stored in cached_answers.values())
                try:
                    self.used_answers |= self._ask_concurrently(client, server, new_questions, task, has_answered)
                except (EndpointError, ParamsError):
                    self._revoke_answers_after_change(client, server, new_questions, questions)
                    raise
                self.used_answers |= self._revoke_answers_after_change(client, server, new_questions, questions)
        return cached_answers

    # Which cached answers may be used

    def _server_without_request(self, keys: Iterable[str]) -> ServerIdentity | None:
        """Return the server whose cached answers answer all questions, so that no request is needed.

        Return None if a request is needed, because an answer is not cached or because `reuse` is False.
        """
        if self.reuse is False:
            return None
        if server := self._server_with_all_answers(keys):
            return server
        if not all(self.answers.answers_to(key) for key in keys):
            return None
        servers: list[ServerIdentity | None] = []
        for key in keys:
            servers += [stored.server for stored in self._answers_at_url(key)]
        return servers[-1] if servers else ServerIdentity(normalised_url(self.url))

    def _server_with_all_answers(self, keys: Iterable[str]) -> ServerIdentity | None:
        """Return the server at this URL for which every answer is cached, or None if there is no such server.

        If there are several such servers, the last one is returned.
        """
        answer_counts: Counter[ServerIdentity | None] = Counter()
        for key in keys:
            answer_counts.update(stored.server for stored in self._answers_at_url(key))
        question_count = len(list(keys))
        complete_servers = [server for server, count in answer_counts.items() if count == question_count]
        return complete_servers[-1] if complete_servers else None

    def _answers_at_url(self, key: str) -> list[StoredAnswer]:
        """Return the cached answers to a question that came from this URL."""
        url = normalised_url(self.url)
        answers = self.answers.answers_to(key)
        return [stored for stored in answers if stored.server is not None and stored.server.url == url]

    def _check_urls_of_answers(self, keys: Iterable[str]) -> None:
        """Check that no question has cached answers only from other URLs, before anything is sent.

        Raises:
            OtherServerError: there is such a question, and `reuse` is None.
        """
        if self.reuse is not None:
            return
        other_servers: dict[str, ServerIdentity | None] = {}
        for key in keys:
            stored_answers = self.answers.answers_to(key)
            if stored_answers and not self._answers_at_url(key):
                other_servers[key] = stored_answers[-1].server
        requested_server = Fault("endpoint.requested_server", server=normalised_url(self.url), model=self.model)
        self._raise_if_other_servers(other_servers, keys, requested_server)

    def _select_cached_answers(self, keys: Iterable[str], server: ServerIdentity) -> dict[str, StoredAnswer]:
        """Return the cached answers that may be used instead of asking the server, depending on `reuse`.

        Raises:
            OtherServerError: `ask` has already returned answers from another server, and `reuse` is not True. If a
                server is restarted with different weights between two calls, the result would otherwise mix two models.
                Also raised if all cached answers to a question are from other servers, and `reuse` is None.
        """
        usable_answers: dict[str, StoredAnswer] = {}
        other_servers: dict[str, ServerIdentity | None] = {}
        if self.reuse is not True:
            other_servers = {key: stored.server for key, stored in self.used_answers.items() if stored.server != server}
        for key in keys:
            stored_answers = self.answers.answers_to(key)
            answers_of_server = [stored for stored in stored_answers if stored.server == server]
            candidates = answers_of_server or self._answers_at_url(key) or stored_answers
            if answers_of_server or (candidates and self.reuse):
                usable_answers[key] = candidates[-1]
            elif candidates and self.reuse is None:
                other_servers[key] = candidates[-1].server
        self._raise_if_other_servers(
            other_servers, keys, Fault("endpoint.requested_server", server=server, model=self.model)
        )
        return usable_answers

    def _raise_if_other_servers(
        self, other_servers: Mapping[str, ServerIdentity | None], keys: Iterable[str], requested_server: Fault
    ) -> None:
        """Raise OtherServerError if `other_servers`, which maps the keys of questions to servers, is not empty."""
        if other_servers:
            raise other_server_error(
                path=self.answers.path,
                servers=Counter(other_servers.values()),
                requested_server=requested_server,
                questions=len({*keys, *self.used_answers}),
                option=self.option,
            )

    def _revoke_answers_after_change(
        self, client: Any, server: ServerIdentity, new_questions: Mapping[str, EndpointQuestion], keys: Iterable[str]
    ) -> dict[str, StoredAnswer]:
        """Store the new answers as answers of an unknown server if the URL now serves another model.

        It is then unknown which of the two models gave these answers. Return the stored answers, or an empty
        dictionary if the model has not changed or if the server does not report what it serves.

        Raises:
            OtherServerError: the URL now serves another model, and `reuse` is not True.
        """
        if server.id is None:
            return {}
        try:
            present_server = self._identify(client.with_options(max_retries=0))
        except EndpointError:
            return {}
        if present_server.id is None or present_server == server:
            return {}
        uncertain_answers: dict[str, StoredAnswer] = {}
        for key, question in new_questions.items():
            for stored in self.answers.answers_to(key):
                if stored.server == server:
                    uncertain_answers[key] = self.answers.store_answer(key, self._content_of(question), stored.answer)
                    self.answers.revoke_answer(key, server)
        if self.reuse is not True:
            requested_server = Fault(
                "endpoint.changed_server", server=present_server, earlier_server=server, model=self.model
            )
            self._raise_if_other_servers(dict.fromkeys(uncertain_answers), keys, requested_server)
        return uncertain_answers

    def forget(self, questions: Iterable[EndpointQuestion]) -> None:
        """Revoke the answers to these questions that `ask` returned, so that the next run asks them again."""
        for question in questions:
            key = self.key(question)
            stored = self.used_answers.pop(key, None)
            if stored is not None:
                self.answers.revoke_answer(key, stored.server)

    def key(self, question: EndpointQuestion) -> str:
        """Return the key of a question: a digest of its content and of the model's name."""
        content = json.dumps(self._content_of(question), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def _content_of(self, question: EndpointQuestion) -> dict[str, Any]:
        """Return everything that the answer to a question depends on, as written to the cache."""
        content: dict[str, Any] = {
            "model": self.model,
            "system": question.system,
            "question": question.text,
            "images": [sha256(path) for path in question.images],
            "seed": question.seed,
            "n": question.n,
            "max_tokens": self.max_tokens,
        }
        if question.history:  # left out otherwise, so that earlier answers in the cache keep their keys
            content["history"] = [turn._asdict() for turn in question.history]
        return content

    # The server

    def _client(self) -> Any:
        import openai

        return openai.OpenAI(
            base_url=self.url,
            api_key=os.environ.get(self.key_variable) or "none",
            max_retries=RETRIES,
            timeout=openai.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s)),
            http_client=http_client(trust_env=not on_this_machine(self.url)),
        )

    def _identify_or_reuse(self, client: Any, keys: Iterable[str]) -> ServerIdentity:
        """Return the server's identity. If it cannot be reached, return the server for which every answer is cached.

        Raises:
            EndpointError: the server cannot be reached, and not every answer is cached.
        """
        try:
            return self._identify(client)
        except EndpointError:
            server = self._server_with_all_answers(keys)
            if server is None:
                raise
            return server

    def _identify(self, client: Any) -> ServerIdentity:
        """Return the server's identity: its URL and what `GET /v1/models` reports about the model.

        If the server has no list of models, the identity is only the URL.

        Raises:
            EndpointError: the server cannot be reached.
        """
        import openai

        limit_s = min(IDENTIFY_S, self.timeout_s)
        try:
            reply = client.with_options(timeout=limit_s).models.with_raw_response.list()
        except (openai.APIStatusError, openai.APITimeoutError):
            return ServerIdentity(normalised_url(self.url))
        except openai.OpenAIError as error:
            self._raise_if_redirect(error)
            raise EndpointError(
                "endpoint.no_list_of_models", url=self.url, model=self.model, cause=describe_error(error)
            ) from error
        return identity_in_list(self.url, self.model, reply.text)

    def _ask_concurrently(
        self,
        client: Any,
        server: ServerIdentity,
        questions: Mapping[str, EndpointQuestion],
        task: str,
        has_answered: bool,
    ) -> dict[str, StoredAnswer]:
        """Ask every question and cache the answers. Return the answers by key.

        Args:
            has_answered: whether the server has answered other questions in an earlier run. If so, a rejected question
                does not mean that the server rejects all questions of this form.
        """
        watch = SilenceWatch(lambda: self._report_silence(task))
        answers: dict[str, StoredAnswer] = {}
        rejections: dict[str, openai.APIStatusError] = {}
        unanswered_keys: list[str] = []

        def ask_question(key: str) -> bool:
            """Ask a question and record the outcome. Return whether the server answered it."""
            if not watch.begin_question():
                return False
            question = questions[key]
            outcome = None
            try:
                outcome = self._send_with_retry(client, question, watch)
            finally:
                watch.end_question(is_answered=outcome is not None)
            if outcome is None:
                unanswered_keys.append(key)
            elif isinstance(outcome, EndpointAnswer):
                answers[key] = self.answers.store_answer(key, self._content_of(question), outcome, server)
            else:
                rejections[key] = outcome
            return isinstance(outcome, EndpointAnswer)

        with ThreadPoolExecutor(CONCURRENT_QUESTIONS) as pool:
            try:
                outcomes = map_in_windows(pool, ask_question, list(questions))
                for is_answered in progress(outcomes, task, len(questions), "question"):
                    has_answered |= is_answered
                    # If this many questions are rejected and none is answered, the form of the questions is the cause
                    if not has_answered and len(rejections) >= CONCURRENT_QUESTIONS:
                        break
                    if watch.is_stopped:
                        break
            finally:
                watch.stop()
                pool.shutdown(cancel_futures=True)
        for key, error in rejections.items():
            if not has_answered:
                raise self._rejected_question_error(error, questions[key])
            refusal = EndpointAnswer("refused", error.message)
            answers[key] = self.answers.store_answer(key, self._content_of(questions[key]), refusal, server)
        if unanswered_keys:
            silent_questions = [questions[key] for key in unanswered_keys]
            raise EndpointError(self._fault_of_silence(silent_questions, len(answers), watch.consecutive_silences))
        return answers

    def _send_with_retry(
        self, client: Any, question: EndpointQuestion, watch: SilenceWatch
    ) -> "EndpointAnswer | openai.APIStatusError | None":
        """Send a question up to ATTEMPTS times. Return the answer or rejection, or None if none arrives in time."""
        import openai

        for _ in range(ATTEMPTS):
            try:
                return self._send(client, question)
            except openai.APITimeoutError:
                watch.record_silence()
            if watch.is_stopped:
                break
        return None

    def _send(self, client: Any, question: EndpointQuestion) -> "EndpointAnswer | openai.APIStatusError":
        """Send a question once and return the answer, or the error with which the server rejects the question.

        Raises:
            openai.APITimeoutError: no answer arrived in time.
            EndpointError: the server cannot be reached, or it fails.
            ParamsError: the server rejects the key or the model.
        """
        import openai

        try:
            return read_answer(client.chat.completions.create(**self._request(question)))
        except openai.APITimeoutError:
            raise
        except openai.APIStatusError as error:
            if error.code == "content_filter":
                return EndpointAnswer("refused", error.message)
            if error.status_code in REJECTED_STATUSES:
                return error
            may_succeed_later = error.status_code >= 500 or error.status_code in RETRY_STATUSES
            if may_succeed_later:
                raise self._failed_question_error(error, question) from error
            raise self._rejected_question_error(error, question) from error
        except (openai.OpenAIError, json.JSONDecodeError) as error:
            self._raise_if_redirect(error)
            # The server was not reached, or the reply was truncated
            raise self._failed_question_error(error, question) from error

    def _raise_if_redirect(self, error: Exception) -> None:
        """Raise RedirectError with the URL of this endpoint if the error was caused by a redirect."""
        redirect = error.__cause__
        if isinstance(redirect, RedirectError):
            raise redirect_error(self.url, redirect.status, redirect.target) from error

    def _request(self, question: EndpointQuestion) -> dict[str, Any]:
        """Return the arguments for openai's call."""
        messages: list[dict[str, Any]] = []
        if question.system:
            messages.append({"role": "system", "content": replace_surrogates(question.system)})
        image_parts = [{"type": "image_url", "image_url": {"url": data_url(path)}} for path in question.images]
        for turn in (*question.history, Turn(question.text)):
            text = replace_surrogates(turn.question)
            content: Any = [*image_parts, {"type": "text", "text": text}] if image_parts else text
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": replace_surrogates(turn.answer)})
            image_parts = []  # only the first message has the images
        messages.pop()  # the answer to the question
        request: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": 0}
        if question.seed is not None:
            request["seed"] = question.seed
        if self.max_tokens is not None:
            request["max_tokens"] = self.max_tokens
        return request

    # Messages

    def _report_silence(self, task: str) -> None:
        """Print that the server did not answer, because the progress bar does not move before the first answer."""
        print(
            f"{task}: {self.url} did not answer a question within {self.timeout_s:g} s; each such question is sent "
            f"{ATTEMPTS} times",
            file=sys.stderr,
            flush=True,
        )

    def _fault_of_silence(
        self, questions: Sequence[EndpointQuestion], answers: int, consecutive_silences: int
    ) -> Fault:
        """Return the fault for a server that hangs or is too slow.

        Args:
            questions: the questions without an answer in time.
            answers: number of answers in this run.
            consecutive_silences: number of questions without an answer since the last answer.
        """
        max_images = max(len(question.images) for question in questions)
        hangs = not answers or consecutive_silences >= CONCURRENT_QUESTIONS
        if max_images:
            code = "endpoint.silent_on_images" if hangs else "endpoint.slow_on_images"
        else:
            code = "endpoint.silent" if hangs else "endpoint.slow"
        return Fault(
            code,
            url=self.url,
            model=self.model,
            questions=len(questions),
            images=max_images,
            answers=answers,
            limit=self.timeout_s,
            attempts=ATTEMPTS,
        )

    def _failed_question_error(self, error: Exception, question: EndpointQuestion) -> EndpointError:
        """Return the error for a question that may succeed in a later run."""
        return EndpointError(
            "endpoint.failed",
            url=self.url,
            model=self.model,
            cause=describe_error(error),
            names=describe_question(question),
        )

    def _rejected_question_error(self, error: Exception, question: EndpointQuestion) -> ParamsError:
        """Return the error for a question that the server rejects."""
        return ParamsError(
            "endpoint.refused",
            url=self.url,
            model=self.model,
            cause=describe_error(error),
            names=describe_question(question),
        )


def describe_question(question: EndpointQuestion) -> list[str]:
    """Return how a message refers to a question: by the paths of its images, or by the beginning of its text."""
    if question.images:
        return [str(path) for path in question.images]
    return [repr(question.text[:MAX_QUESTION_CHARS])]


def map_in_windows(pool: ThreadPoolExecutor, function: Callable[[str], bool], keys: Sequence[str]) -> Iterator[bool]:
    """Yield the result of a function for each key, in order. At most WINDOW keys are in the pool at a time."""
    for start in range(0, len(keys), WINDOW):
        yield from pool.map(function, keys[start : start + WINDOW])
