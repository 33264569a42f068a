"""The section `register`: where versions are kept."""

from typing import Literal

from pydantic import Field, field_validator

from m3diff.settings.section import Section

FORBIDDEN = "/:.%\"'"
"""What MLflow refuses in the name of a model."""


class Register(Section):
    tracking_uri: str
    experiment: str = Field(min_length=1, max_length=500)
    model_name: str = Field(min_length=1)
    keeps: Literal["merged", "adapters"]  # what a version holds: all weights, or those that trained, beside the base

    @field_validator("model_name")
    @classmethod
    def mlflow_takes_it(cls, name: str) -> str:
        if wrong := [letter for letter in FORBIDDEN if letter in name]:
            raise ValueError(f"MLflow refuses {' '.join(wrong)} in the name of a model; write - or _ instead")
        return name
