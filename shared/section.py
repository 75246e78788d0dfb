"""Base of all configuration sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Reject unknown keys and non-finite numbers; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
