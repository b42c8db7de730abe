"""Pydantic model -> structural OpenAPI schema, as a CustomResourceDefinition demands it.

The differences to pydantic's JSON schema: references are inlined, titles go, an optional field is
an absent one (no ``null``), integers say their width, bounded strings stay as they are.
"""

from __future__ import annotations

from typing import Any

from rose_core.api.common import ApiModel

_INT32 = 2**31


def structural(model: type[ApiModel]) -> dict[str, Any]:
    """The model's schema with everything inlined."""
    raw = model.model_json_schema(by_alias=True)
    return _convert(raw, raw.get("$defs", {}))


def _convert(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    merged = _resolve(node, definitions)
    out = {
        key: value
        for key, value in merged.items()
        if key not in {"title", "$defs", "properties", "items", "additionalProperties"}
    }
    if out.get("default", 0) is None:
        del out["default"]
    if isinstance(out.get("default"), dict):  # a null would not be of the field's type
        out["default"] = {k: v for k, v in out["default"].items() if v is not None}
    if "const" in out:
        out["enum"] = [out.pop("const")]
    if "properties" in merged:
        out["properties"] = {
            name: _convert(child, definitions) for name, child in merged["properties"].items()
        }
    if "items" in merged:
        out["items"] = _without_description(_convert(merged["items"], definitions))
    if isinstance(merged.get("additionalProperties"), dict):
        out["additionalProperties"] = _convert(merged["additionalProperties"], definitions)
    if out.get("type") == "integer":
        out["format"] = "int32" if out.get("maximum", _INT32) < _INT32 else "int64"
    return out


def _resolve(node: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Inline ``$ref`` and ``X | None``; what stands beside the reference wins."""
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[1]]
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _resolve(target, definitions) | beside
    if "anyOf" in node:
        chosen = [option for option in node["anyOf"] if option.get("type") != "null"]
        beside = {key: value for key, value in node.items() if key != "anyOf"}
        return _resolve(chosen[0], definitions) | beside
    return node


def _without_description(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "description" or "enum" not in node}
