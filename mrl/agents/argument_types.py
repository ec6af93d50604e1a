"""The JSON schemas of tools: a parameter's declared types, and a value in text form converted by them.

The types come from `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref` of the tool's `parameters`. The
standard library only: environments' processes read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mrl import strict_json

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": JSON schema}}
MAX_DEPTH = 32  # of references and unions in a schema
_KINDS: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "integer", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}


def declared_types(tools: Sequence[Tool], name: str, parameter: str) -> set[str] | None:
    """Returns the JSON types that the tool `name` declares for a parameter; None if it declares none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            root = function.get("parameters")
            schema = root if isinstance(root, Mapping) else {}
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and parameter in properties:
                return _types(properties[parameter], schema)
            return _types(schema.get("additionalProperties"), schema)
    return None


def convert_argument(text: str, types: set[str] | None) -> Any:
    """Returns the value of `text`: the text itself if no type or a string is declared, else strict JSON.

    `null` is null wherever null is declared. True, False and None are read for boolean and null, since chat templates
    show them in earlier turns. Raises ValueError if the value has none of the types.
    """
    if types is None:
        return text
    if "null" in types and text == "null":
        return None
    if "string" in types:
        return text
    word = text.strip()
    if "boolean" in types and word in ("True", "False"):
        return word == "True"
    if "null" in types and word == "None":
        return None
    wanted = " or ".join(sorted(types))
    try:
        value = strict_json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text[:40]!r} is not JSON of type {wanted}: {error.msg}") from None
    if "integer" in types and "number" not in types and isinstance(value, float) and value.is_integer():
        return int(value)
    kind = _KINDS[type(value)]
    if kind not in types and not (kind == "integer" and "number" in types):
        raise ValueError(f"{text[:40]!r} is of type {kind}, expected {wanted}")
    return value


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str] | None:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return None
    if isinstance(ref := schema.get("$ref"), str):
        return _types(_referenced(root, ref), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)} or None
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {_KINDS[type(value)] for value in values if type(value) in _KINDS} or None
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            found = [_types(part, root, depth + 1) for part in parts]
            known = [types for types in found if types is not None]
            if key == "allOf":
                return set.intersection(*known) or None if known else None
            return set[str]().union(*known) if known and len(known) == len(found) else None
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else None


def _referenced(root: Any, ref: str) -> Any:
    """Returns the part of a schema that a local reference such as #/$defs/City names; None if there is none."""
    found = root if ref.startswith("#") else None
    for part in filter(None, ref.lstrip("#").split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found
