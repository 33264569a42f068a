"""The section `serve`: how requests are batched, and what one request may ask of the server."""

from pydantic import Field

from m3diff.settings.section import Section


class Serve(Section):
    port: int = Field(ge=1, le=65535)
    replicas: int = Field(ge=1)  # processes on a Ray cluster; while a version takes over, twice as many
    batch_pairs: int = Field(ge=1)  # captioned at once by one replica, at most
    max_queue: int = Field(ge=1)  # requests at a time: being read, waiting or answered; 429 above it
    max_request_mb: float = Field(gt=0)  # million bytes of one request; 413 above it
    max_image_mpx: float = Field(gt=0, le=170)  # million pixels of one padded image; 422 above. Pillow stops at 178
    answer_s: float = Field(gt=0)  # from the end of a request to the answer; 503 after it
