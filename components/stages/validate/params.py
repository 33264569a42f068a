"""The section `validate`: limits above which rows, images or all of the data are rejected."""

from pydantic import Field

from m3diff.settings.section import Section


class Validate(Section):
    """Limits for rows, captions and images, and the shares of bad and leaked rows above which the stage fails."""

    max_quarantined_share: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of bad rows in each split of each dataset. Above this share, the stage fails. One bad row per split
    is always allowed, unless the value is 0."""

    max_leaked_share: float = Field(default=0.05, ge=0, le=1)
    """Maximum share of a dataset's training rows that are also in a test set. Such rows are not used for training.
    Above this share, the stage fails, because the published splits cannot be trusted."""

    allow_lost_test_pairs: bool = False
    """Whether to continue if test pairs are quarantined. If true, report.json lists these pairs, and models are tested
    without them. If false, the stage fails, because scores on an incomplete test set cannot be compared with published
    scores."""

    max_caption_chars: int = Field(default=2000, ge=1)
    """Maximum length of a reference, in characters. A row with a longer reference is quarantined."""

    max_image_pixels: int = Field(default=100_000_000, ge=1)
    """Maximum number of pixels of an image after padding to a square, as models see the image. A larger image is
    treated as a decompression bomb and is not decoded. `m3diff caption` uses the same limit."""

    allow_test_leakage: bool = False
    """If true, training pairs that are also in a test set are used for training, and the report still counts them. Use
    this only for experiments."""

    near_duplicate_max_diff: int | None = Field(default=2, ge=0, le=255)
    """Two images count as the same picture if their 8x8 thumbnails differ by at most this many grey levels. Re-encoding
    and resizing change values by 1 or 2 levels. A larger limit also matches different frames of a fixed camera. null
    compares file contents only."""

    compare_px: int = Field(default=384, ge=8)
    """Side of the square image that the model sees, in pixels. Changes that vanish at this size are counted as
    hidden."""
