"""The models behind one address, by the names that requests call them."""

from collections.abc import Sequence

from starlette.requests import Request

from rayfin.actors.errors import InvalidConfig, ModelNotFound
from rayfin.deployments.openai.service import OpenAIService


class ServedModels:
    """One service for each model: its names, its text side and its engines.

    What belongs to the ingress as a whole (its edge, load, quotas, stored responses and answers) is
    the same object in all of them. The first model is for requests that name none.

    Raises:
        InvalidConfig: two models have the same name.
    """

    def __init__(self, services: Sequence[OpenAIService]) -> None:
        self.services = tuple(services)
        self._by_name: dict[str, OpenAIService] = {}
        for service in self.services:
            for name in service.model_names:
                if name in self._by_name:
                    raise InvalidConfig(
                        f"served_model_name {name!r} is used twice", "served_model_name"
                    )
                self._by_name[name] = service

    @property
    def first(self) -> OpenAIService:
        return self.services[0]

    @property
    def names(self) -> list[str]:
        """All names, those of a model together, in the order of the models."""
        return list(self._by_name)

    def named(self, name: str | None) -> OpenAIService:
        """The model of that name; the first one without a name.

        Raises:
            ModelNotFound: there is none.
        """
        if name is None:
            return self.first
        if name not in self._by_name:
            raise ModelNotFound(f"The model `{name[:128]}` does not exist.", "model")
        return self._by_name[name]

    def asked(self, request: Request, name: str | None) -> OpenAIService:
        """The model that the request names, among whose requests it counts from here on."""
        service = self.named(name)
        request.state.counts = service.counts
        return service
