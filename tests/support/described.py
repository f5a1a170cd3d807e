"""Answers held to the API's own description, /openapi.json."""

from typing import Any

import httpx
import jsonschema


class Description:
    """The document of an API that a client reaches."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    @classmethod
    async def of(cls, http: httpx.AsyncClient) -> "Description":
        return cls((await http.get("/openapi.json")).raise_for_status().json())

    def check(self, path: str, response: httpx.Response) -> None:
        """The answer has a described form that is no more than an object.

        Args:
            path: as the document writes it, with its parameters in braces.
        """
        operation = self._document["paths"][path][response.request.method.lower()]
        kind = response.headers["content-type"].partition(";")[0]
        content = operation["responses"][str(response.status_code)]["content"]
        schema = content[kind]["schema"]
        assert "$ref" in schema, f"{path} has no model"
        whole = {**schema, "components": self._document["components"]}
        jsonschema.validate(response.json(), whole)
