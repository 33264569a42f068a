"""The section `validate`: limits above which rows, images or the whole data are refused."""

from pydantic import Field

from m3diff.settings.section import Section


class Validate(Section):
    max_quarantined_share: float = Field(ge=0, le=1)  # of any dataset's rows of one split
    max_leaked_share: float = Field(ge=0, le=1)  # of any dataset's training rows: those that are in a test set
    allow_lost_test_pairs: bool  # go on without the test pairs that are in quarantine; report.json names them
    max_caption_chars: int = Field(ge=1)
    max_image_pixels: int = Field(ge=1)  # of the square that it is padded to; a larger image is taken for a bomb
    allow_test_leakage: bool  # train on pairs that are in a test set; the report counts them all the same
    near_duplicate_max_diff: int | None = Field(ge=0, le=255)  # grey levels; null compares contents only
    compare_px: int = Field(default=384, ge=8)  # side of the square that the model sees: hidden changes are counted
