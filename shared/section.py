"""Base of all configuration sections."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from shared import own_rules, packages

Fraction = Annotated[float, Field(ge=0, le=1)]
OwnRuleText = Annotated[str, AfterValidator(own_rules.checked)]


class Section(BaseModel):
    """Reject unknown keys and non-finite numbers; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_as_number(cls, values: Any) -> Any:
        """Raise ValueError for true or false where a number is wanted: pydantic takes them for 1 and 0."""
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and (field := cls.model_fields.get(name)) is not None:
                kinds = {field.annotation, *get_args(field.annotation)}
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name}={str(value).lower()} is not a number")
        return values


class PackageSection(Section):
    """A section that a package adds to the configuration; all its keys have defaults.

    `may_change` says if its keys may change during a run, and `reason` why (shared.run.pinned). `changeable` are keys
    that may change although others may not, with the reasons. `paths` are keys whose values are files of this machine,
    in a list.
    """

    may_change: ClassVar[bool] = False
    reason: ClassVar[str] = "it may decide what is trained"
    changeable: ClassVar[Mapping[str, str]] = {}
    paths: ClassVar[tuple[str, ...]] = ()

    def findings(self, config: Any) -> Iterable[str]:
        """Find settings of the section that have no effect in a RunConfig of RL (shared.findings)."""
        return ()


@dataclass(frozen=True, slots=True)
class PackageKey[T]:
    """A key that a package adds to a section of the core.

    It does not affect what is trained: it may change at any time, and is not recorded (shared.run.pinned).
    """

    type: Any
    default: T
    description: str


@dataclass(frozen=True, slots=True)
class NameOf:
    """Annotation of a text that names one of several parts, of the core or of packages.

    Args:
        known: lists the names.
    """

    known: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "enum": [*self.known()]}

    def _checked(self, name: str) -> str:
        """Return the name. Raises ValueError for one that is not known."""
        if name in (names := [*self.known()]):
            return name
        near = get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(names)}"
        raise ValueError(f"{name[:200]!r} is unknown: {packages.missing(name) or meant}")
