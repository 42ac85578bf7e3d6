"""Renders the OpenAPI document as one page of static HTML: no script, and nothing from other hosts."""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-family:ui-monospace,monospace}summary{cursor:pointer}details{margin:.4rem 0}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #8886;padding:.2rem .6rem;text-align:left;"
    "vertical-align:top}h3{margin-bottom:0}:root{color-scheme:light dark}"
)
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
# Only the style of the page itself is allowed.
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PREFIX = "#/components/schemas/"


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the page."""
    info, schemas = document["info"], document["components"]["schemas"]
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} "
        '<a href="openapi.json">openapi.json</a></p><h2>Routes</h2>',
    ]
    for path, methods in document["paths"].items():
        parts += (_operation(path, method, operation) for method, operation in methods.items())
    parts.append("<h2>Bodies</h2>")
    parts += (_schema(name, schema) for name, schema in schemas.items())
    return "".join([*parts, "</body></html>"])


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    rows = []
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append(("body", media, _type(content["schema"])))
    for status, response in operation["responses"].items():
        content = response.get("content", {})
        bodies = ", ".join(f"{_type(one['schema'])} ({escape(media)})" for media, one in content.items())
        rows.append((status, response["description"], bodies))
    table = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td><td>{c}</td></tr>" for a, b, c in rows)
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    return f"<details><summary>{head}</summary><table>{table}</table></details>"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(field)}</code>{' (required)' if field in required else ''}</td><td>{_type(one)}</td>"
        f"<td>{escape(one.get('description', ''))}</td></tr>"
        for field, one in schema.get("properties", {}).items()
    ]
    about = escape(schema.get("description", ""))
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{about}</p><table>{"".join(rows)}</table>'


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema in a few words of HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    limits = [f"{key} {schema[key]:,}" for key in ("minItems", "maxItems", "minLength", "maxLength") if key in schema]
    said = f" ({escape(', '.join(limits))})" if limits else ""
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema['items']) if 'items' in schema else 'any'}{said}"
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return f"object of {_type(schema['additionalProperties'])}{said}"
        case None:
            return "any"
        case kind:
            return f"{escape(str(kind))}{said}"
