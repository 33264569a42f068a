"""The server's counts, which Prometheus reads at `GET /metrics`, and the lines that it prints."""

import os
import sys
from typing import TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
PAIRS = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """A registry of its own: two servers in one process, as in tests, count apart."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "m3diff_requests", "Requests by route and HTTP status", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "m3diff_request_seconds",
            "Seconds from a request's head to the end of its answer",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch = Histogram(
            "m3diff_batch_pairs", "Pairs that shared an answer's batch", buckets=PAIRS, registry=registry
        )
        self.queue = Gauge("m3diff_queue_length", "Requests being read, waiting or answered", registry=registry)
        self.model = Gauge("m3diff_model", "1 for the version that answers", ["version"], registry=registry)
        self.switches = Counter("m3diff_model_switches", "Versions that began to answer", registry=registry)
        self.poll_failures = Counter(
            "m3diff_model_failures", "Times that the next version could not be had", registry=registry
        )

    def serves(self, version: str) -> None:
        self.model.clear()
        self.model.labels(version).set(1)
        self.switches.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


def say(text: str, to: TextIO | None = None) -> None:
    """Print a line to the output, else to `to`; where nobody reads that any more (`m3diff serve | head`), to nobody."""
    out = to or sys.stdout
    try:
        print(f"m3diff serve: {text}", file=out, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
