"""The OpenAPI document of port 8000: the paths, and the bodies as the call models have them.

The routes read their bodies themselves (errors have OpenAI's shape), so the document is made here and not by the
framework. Called by `server`.
"""

from collections.abc import Sequence

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tidegate_engine.ollama import OllamaChatCall, OllamaEmbedCall, OllamaGenerateCall, ShowCall
from tidegate_engine.openai import ChatCall, CompletionCall, DetokenizeCall, EmbeddingCall, TokenizeCall
from tidegate_engine.responses import ResponseCall

BODIES: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/chat/completions": (ChatCall, "Answer a conversation"),
    "/v1/completions": (CompletionCall, "Continue a text"),
    "/v1/responses": (ResponseCall, "Answer a conversation, in the form of the Responses API"),
    "/v1/embeddings": (EmbeddingCall, "Embed texts"),
    "/tokenize": (TokenizeCall, "Ids of a text or a conversation"),
    "/detokenize": (DetokenizeCall, "Text of ids"),
    "/api/chat": (OllamaChatCall, "Answer a conversation, in Ollama's form"),
    "/api/generate": (OllamaGenerateCall, "Continue a text, in Ollama's form"),
    "/api/embed": (OllamaEmbedCall, "Embed texts, in Ollama's form"),
    "/api/show": (ShowCall, "What the model is, in Ollama's form"),
}
QUESTIONS = {
    "/v1/models": "The served models",
    "/v1/models/{name}": "One served model",
    "/api/tags": "The served models, in Ollama's form",
    "/api/ps": "The loaded models, in Ollama's form",
    "/": "A text, while the server is there",
    "/api/version": "The version of Ollama that its API follows",
    "/health": "200 while the engine works",
    "/ping": "200 while the engine works",
    "/load": "Running and waiting requests",
    "/version": "The engine's version",
    "/metrics": "Prometheus metrics",
    "/openapi.json": "This document",
}


def describe_api(served_names: Sequence[str], *, version: str) -> dict[str, object]:
    """The document; a body's `model` names the models that are served."""
    models = [(model, "validation") for model, _ in BODIES.values()]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = definitions["$defs"]
    for model, _ in BODIES.values():
        field = schemas[model.__name__]["properties"].get("model", {})
        if field.get("type") == "string":
            field["enum"] = list(served_names)
    paths: dict[str, object] = {
        path: {"post": {"summary": summary, "requestBody": _body(model), "responses": _responses()}}
        for path, (model, summary) in BODIES.items()
    }
    for path, summary in QUESTIONS.items():
        parameters = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {
            "get": {
                "summary": summary,
                "parameters": parameters if "{" in path else [],
                "responses": _responses(),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tidegate engine", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _body(model: type[BaseModel]) -> dict[str, object]:
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"required": True, "content": {"application/json": {"schema": reference}}}


def _responses() -> dict[str, object]:
    return {
        "200": {"description": "The answer"},
        "4XX": {"description": "What is wrong with the request"},
        "503": {"description": "Not now; retry after the time in Retry-After"},
    }
