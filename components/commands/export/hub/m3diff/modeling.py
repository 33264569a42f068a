"""M3Diff as others load it."""

from m3diff.commands.export.hub.whole import WholeModel
from m3diff.models.m3diff.modeling import M3DiffForConditionalGeneration as Trainable


class M3DiffForConditionalGeneration(WholeModel, Trainable):
    """M3Diff with its language-model head: two images and a question in, what changed out (arXiv 2503.11093)."""
