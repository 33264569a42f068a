"""Limit the messages that Ray logs in this process and in its workers."""

import logging

import ray


class RayErrorsOnly(ray.LoggingConfig):
    """Limit Ray's own loggers to errors, because Ray's cleanup processes warn about harmless events.

    `ray.LoggingConfig` by itself also limits the root logger of this process and of its workers. The warnings of this
    project, for example that files of a checkpoint were edited, would be lost.
    """

    def __init__(self) -> None:
        super().__init__(log_level="ERROR")

    def _configure_logging(self) -> None:
        logging.getLogger("ray").setLevel(self.log_level)
