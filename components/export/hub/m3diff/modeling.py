"""M3Diff as others load it: every weight must be there, the MDP module's, too."""

from typing import Any

from components.models.m3diff.modeling import M3DiffForConditionalGeneration as Trainable


class M3DiffForConditionalGeneration(Trainable):
    """M3Diff with its language-model head: two images and a question in, what changed out (arXiv 2503.11093)."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a trained M3Diff. Raises ValueError where a weight is missing: none is made anew without a word."""
        name = pretrained_model_name_or_path
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"{name}: {len(missing)} weights are missing, so it is not the model that was trained: {missing[:3]}; "
                "fetch or export the folder again"
            )
        return (model, info) if output_loading_info else model
