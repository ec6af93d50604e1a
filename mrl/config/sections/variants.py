"""Sections whose keys depend on the value of one of them, such as the keys of the selected algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from mrl.options.base import Options, Section

TAG = "\0"  # prefix of a variant's name in pydantic's error locations; no key of a file can contain it


@dataclass(frozen=True, eq=False)
class Variants:
    """Annotation of a section: `Annotated[AlgorithmConfig, Variants("adv_estimator", "estimator", ESTIMATORS)]`.

    Attributes:
        by: the key whose value selects the variant
        noun: what the key selects, for messages
        kinds: value -> the options class with the further keys
    """

    by: str
    noun: str
    kinds: Mapping[str, type[Options]]
    _made: dict[type[Section], dict[str, type[Section]]] = field(default_factory=dict)

    def sections(self, common: type[Section]) -> dict[str, type[Section]]:
        """Returns, for every value of the key, the class of the whole section."""
        made = self._made.setdefault(common, {})
        for name, kind in self.kinds.items() if not made else ():
            chosen: Any = {self.by: (Literal[name], name)}
            made[name] = create_model(f"{common.__name__}[{name}]", __base__=(kind, common), **chosen)
        return made

    def __get_pydantic_core_schema__(self, common: type[Section], handler: GetCoreSchemaHandler) -> CoreSchema:
        class Unknown(common):  # type: ignore[valid-type, misc]
            """Section with an unknown variant: validates the common keys only."""

            model_config = ConfigDict(extra="ignore")

        sections = {**self.sections(common), "": Unknown}
        choices = {TAG + name: handler.generate_schema(section) for name, section in sections.items()}

        def tag(given: Any) -> str:
            name = dict(given).get(self.by) if isinstance(given, dict | Section) else None
            return TAG + name if isinstance(name, str) and name in self.kinds else TAG

        def read(given: Any) -> Any:
            return self._read(common, given) if isinstance(given, dict) else given

        union = core_schema.tagged_union_schema(choices, discriminator=tag)
        return core_schema.no_info_before_validator_function(read, union)

    def _read(self, common: type[Section], given: dict[str, Any]) -> dict[str, Any]:
        """Replaces former key names, writes out the choice, and drops default-valued keys of other algorithms."""
        implied = (name for name, kind in self.kinds.items() if kind.implied_by in given)
        name = given[self.by] if self.by in given else next(implied, common.model_fields[self.by].get_default())
        if not isinstance(name, str) or name not in self.kinds:
            return given
        kind = self.kinds[name]
        known = {*common.model_fields, *kind.model_fields}
        present = kind.present_names(given).items()
        return {key: value for key, value in present if key in known or not self._is_default(key, value)} | {
            self.by: name
        }

    def _is_default(self, key: str, value: Any) -> bool:
        """True if the value is the key's default in any variant. 1 equals 1.0, but not true."""
        fields = [kind.model_fields.get(key) for kind in self.kinds.values()]
        defaults = [found.get_default() for found in fields if found is not None and not found.is_required()]
        return any(value == default and (type(value) is bool) == (type(default) is bool) for default in defaults)
