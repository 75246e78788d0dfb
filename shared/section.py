"""What every section of the configuration has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are refused; what is read stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
