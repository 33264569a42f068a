"""OneDiff as others load it."""

from m3diff.commands.export.hub.whole import WholeModel
from m3diff.models.onediff.modeling import OneDiffForConditionalGeneration as Trainable


class OneDiffForConditionalGeneration(WholeModel, Trainable):
    """OneDiff with its language-model head: two images and a question in, what changed out (arXiv 2407.05645)."""
