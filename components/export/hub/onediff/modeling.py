"""OneDiff as others load it."""

from components.export.hub.whole import WholeModel
from components.models.onediff.modeling import OneDiffForConditionalGeneration as Trainable


class OneDiffForConditionalGeneration(WholeModel, Trainable):
    """OneDiff with its language-model head: two images and a question in, what changed out (arXiv 2407.05645)."""
