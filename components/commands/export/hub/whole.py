"""A model as others load it: every weight must be there, a new module's, too."""

from typing import Any


class WholeModel:
    """Stands before a model's class, whose `from_pretrained` makes a module anew where a base has none."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a trained model. Raises ValueError where a weight is missing: none is made anew without a word."""
        name = pretrained_model_name_or_path
        model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"{name}: {len(missing)} weights are missing, so it is not the model that was trained: {missing[:3]}; "
                "fetch or export the folder again"
            )
        return (model, info) if output_loading_info else model
