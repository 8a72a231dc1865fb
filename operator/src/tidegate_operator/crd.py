"""The CustomResourceDefinition, generated from the pydantic models of `api` and `api_status`.

`python -m tidegate_operator.crd` in the repository writes the plain file and the chart's template (`make generate`); a
contract test generates again and compares. The schema is structural, and refused here where the API server's cost
budget for CEL would refuse it: nothing unbounded under a rule.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidegate_operator import api, api_status

Schema = dict[str, Any]

PRINTER_COLUMNS = (
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether the model is served.", 0),
    ("Serving", "integer", ".status.readyReplicas", "Replicas that serve.", 0),
    ("Replicas", "integer", ".status.replicas", "Replicas that exist.", 0),
    ("Desired", "integer", ".status.autoscaling.desiredReplicas", "Replicas that should exist.", 0),
    (
        "TTFT-P95-ms",
        "integer",
        ".status.objectives.ttftP95Milliseconds",
        "Time to the first token in milliseconds, 95th percentile.",
        0,
    ),
    ("Mix", "string", ".status.traffic.dominantClass", "Class with the largest share of the requests.", 0),
    ("Batch", "integer", ".status.batching.desired.maxSequences", "Sequences that a replica runs at once.", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', "Why it is ready or not.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since it was made.", 0),
    ("Model", "string", ".spec.model.uri", "Where the model comes from.", 1),
    ("URL", "string", ".status.url", "Address of the OpenAI API inside the cluster.", 1),
    ("Mode", "string", ".spec.autoscaling.mode", "Who sets the number of replicas.", 1),
    ("Metrics", "string", ".status.metrics.state", "Whether measurements are at hand.", 1),
)
MEANINGLESS = frozenset({"title", "$defs", "discriminator", "examples"})


class SchemaError(ValueError):
    """A model says something that a structural schema cannot."""


def custom_resource_definition() -> Schema:
    """The whole CRD as a dict."""
    root = {
        "type": "object",
        "description": "A language model that is served by engine pods, kept within its latency goals.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this schema."},
            "kind": {"type": "string", "description": f"Always {api.KIND}."},
            "metadata": {"type": "object"},
            "spec": structural(api.Spec),
            "status": structural(api_status.Status),
        },
        **api.NAME_RULES,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{api.PLURAL}.{api.GROUP}"},
        "spec": {
            "group": api.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": api.KIND,
                "listKind": f"{api.KIND}List",
                "plural": api.PLURAL,
                "singular": api.SINGULAR,
                "shortNames": [api.SHORT_NAME],
                "categories": list(api.CATEGORIES),
            },
            "versions": [
                {
                    "name": api.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": root},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [_column(*column) for column in PRINTER_COLUMNS],
                }
            ],
        },
    }


def _column(name: str, kind: str, path: str, *text_and_priority: Any) -> Schema:
    description, priority = text_and_priority
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


def structural(model: type[api.Part]) -> Schema:
    """The structural schema of a pydantic model; raises `SchemaError` with the path of what does not fit."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    schema = _convert(raw, raw.get("$defs", {}), model.__name__)
    _refuse_unbounded(schema, model.__name__, under_rule=False)
    return schema


def _convert(raw: Schema, defs: Mapping[str, Schema], path: str, seen: tuple[str, ...] = ()) -> Schema:
    """Inline references, drop what OpenAPI v3.0 or Kubernetes does not know, keep Kubernetes' extensions."""
    if "$ref" in raw:
        name = raw["$ref"].rpartition("/")[2]
        if name in seen:
            raise SchemaError(f"{path}: {name} contains itself")
        beside = {key: value for key, value in raw.items() if key != "$ref"}
        return _convert(_merged(defs[name], beside), defs, path, (*seen, name))
    if "anyOf" in raw:
        return _convert(_without_union(raw, path), defs, path, seen)
    schema = {key: value for key, value in raw.items() if key not in MEANINGLESS and value is not None}
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    for keyword in ("exclusiveMinimum", "exclusiveMaximum", "prefixItems", "allOf", "oneOf", "patternProperties"):
        if keyword in schema:
            raise SchemaError(f"{path}: {keyword} has no structural form here")
    if schema.get("default") == [] or schema.get("default") == {}:
        del schema["default"]
    if schema.pop("uniqueItems", False):
        schema["x-kubernetes-list-type"] = "set"

    def convert(part: Schema, name: str) -> Schema:
        return _convert(part, defs, f"{path}.{name}", seen)

    return _with_children(schema, convert)


def _with_children(schema: Schema, convert: Callable[[Schema, str], Schema]) -> Schema:
    """Convert what lies inside an object or a list."""
    if "properties" in schema:
        schema["properties"] = {name: convert(part, name) for name, part in schema["properties"].items()}
        schema.pop("additionalProperties", None)
    elif schema.get("additionalProperties") is True:
        del schema["additionalProperties"]
        schema["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(schema.get("additionalProperties"), dict):
        schema["additionalProperties"] = convert(schema["additionalProperties"], "*")
    if "items" in schema:
        schema["items"] = convert(schema["items"], "[]")
    return schema


def _merged(named: Schema, beside: Schema) -> Schema:
    """A named model with what its field says: the field's words win, rules of both hold."""
    both = named.get("x-kubernetes-validations", []) + beside.get("x-kubernetes-validations", [])
    return {**named, **beside} | ({"x-kubernetes-validations": both} if both else {})


def _without_union(raw: Schema, path: str) -> Schema:
    """`X | None` is an X that may be absent; `int | str` is Kubernetes' int-or-string; no other union is left."""
    beside = {key: value for key, value in raw.items() if key != "anyOf"}
    parts = [part for part in raw["anyOf"] if part.get("type") != "null"]
    if len(parts) == 1:
        return _merged(parts[0], beside)
    if beside.get("x-kubernetes-int-or-string"):
        return beside
    raise SchemaError(f"{path}: a union of {len(parts)} types is not structural")


def _refuse_unbounded(schema: Schema, path: str, *, under_rule: bool) -> None:
    """The API server takes an unbounded list, map or string under a rule as huge, and refuses the CRD for its cost."""
    under = under_rule or "x-kubernetes-validations" in schema
    if schema.get("type") == "array" and "maxItems" not in schema:
        raise SchemaError(f"{path}: a list needs max_length")
    if under and schema.get("type") == "string" and "maxLength" not in schema and "enum" not in schema:
        raise SchemaError(f"{path}: a string under a rule needs max_length")
    if under and "additionalProperties" in schema and "maxProperties" not in schema:
        raise SchemaError(f"{path}: a map under a rule needs max_length")
    children = {**schema.get("properties", {}), "[]": schema.get("items"), "*": schema.get("additionalProperties")}
    for name, part in children.items():
        if isinstance(part, dict):
            _refuse_unbounded(part, f"{path}.{name}", under_rule=under)


# --- files ---------------------------------------------------------------------------------------------------------

PLAIN_PATH = "crds/tidegate.dev_llmdeployments.yaml"
CHART_PATH = "charts/tidegate/templates/crd.yaml"
LINE_LENGTH = 120
PLAIN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*( [A-Za-z0-9_./()-]+|, [A-Za-z0-9_./()-]+)*\.?")
NOT_TEXT = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})
HEADER = "# Generated from tidegate_operator.api by `make generate`; edit there.\n"


def plain_file() -> str:
    """The CRD as a file for `kubectl apply`."""
    return HEADER + _yaml(custom_resource_definition(), "")


def chart_file() -> str:
    """The chart's copy: a template behind `crds.enabled`, kept on uninstall with `crds.keep`."""
    definition = custom_resource_definition()
    spec = _yaml({"spec": definition["spec"]}, "").replace("{{", '{{ "{{" }}')
    return (
        HEADER
        + "{{- if .Values.crds.enabled }}\n"
        + f"apiVersion: {definition['apiVersion']}\nkind: {definition['kind']}\nmetadata:\n"
        + f"  name: {definition['metadata']['name']}\n"
        + '  labels:\n    {{- include "tidegate.labels" . | nindent 4 }}\n'
        + "  {{- if .Values.crds.keep }}\n  annotations:\n    helm.sh/resource-policy: keep\n  {{- end }}\n"
        + spec
        + "{{- end }}\n"
    )


def _yaml(value: Any, indent: str) -> str:
    """A YAML writer for dicts, lists and scalars, so that the operator needs no YAML library.

    A deep schema is mostly indentation, so a level is one space wide, a list's dashes stand under its key, and what
    fits into a line stands in one.
    """
    lines = []
    entries = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in entries:
        lead = f"{indent}-" if key is None else f"{indent}{_scalar(key)}:"
        if not isinstance(item, dict | list):
            lines.append(f"{lead} {_scalar(item)}\n")
        elif not item or len(lead) + len(_flow(item)) < LINE_LENGTH:
            lines.append(f"{lead} {_flow(item)}\n")
        elif key is None:
            lines.append(f"{lead} {_yaml(item, indent + '  ').lstrip()}")
        else:
            lines.append(f"{lead}\n{_yaml(item, indent if isinstance(item, list) else indent + ' ')}")
    return "".join(lines)


def _flow(value: Any) -> str:
    """A value within a line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and "," in value else _scalar(value)


def _scalar(value: Any) -> str:
    """A scalar as YAML: bare where no reader, of YAML 1.1 either, takes it for anything but this text."""
    if isinstance(value, str) and PLAIN_TEXT.fullmatch(value) and value.lower() not in NOT_TEXT:
        return value
    return json.dumps(value, ensure_ascii=False)


def main(arguments: list[str]) -> int:
    """Write the plain file and the chart's to the two paths, by default those of the repository we stand in."""
    plain, chart = arguments or (PLAIN_PATH, CHART_PATH)
    for path, text in ((plain, plain_file()), (chart, chart_file())):
        Path(path).write_text(text, encoding="utf-8")
        print(f"wrote {path}: {len(text.encode())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
