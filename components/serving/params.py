"""Define the section `serve`, which sets the batch size and the limits on requests."""

from pydantic import Field

from m3diff.settings.section import Section


class Serve(Section):
    """Settings of the HTTP server and its model replicas."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port of the HTTP server."""

    replicas: int = Field(default=1, ge=1)
    """Number of processes on the Ray cluster that load the model. Each process reserves half a GPU if `compute.gpu` is
    true, and none otherwise. A new version starts while the old version is still running, so twice as many processes
    run for a while."""

    batch_pairs: int = Field(default=8, ge=1)
    """Maximum number of pairs that a replica captions in one batch. Larger batches serve more requests per second and
    need more memory."""

    max_queue: int = Field(default=64, ge=1)
    """Maximum number of requests in progress (being read, waiting or being answered). Further requests get HTTP 429."""

    max_request_mb: float = Field(default=20.0, gt=0)
    """Maximum size of a request body in millions of bytes, including base64 encoding. Larger requests get HTTP 413."""

    max_image_mpx: float = Field(default=40.0, gt=0, le=170)
    """Maximum size of an image in millions of pixels after padding to a square. Larger images get HTTP 422. The upper
    bound stays below Pillow's own limit of 178 million pixels."""

    answer_s: float = Field(default=60.0, gt=0)
    """Maximum time from receiving a request to answering it, in seconds. Requests that take longer get HTTP 503."""
