"""Which orders of messages a chat template refuses."""

from typing import Any

from rayfin.deployments.text.parsing.template_probe import (
    ANSWER,
    FIRST,
    QUESTION,
    SECOND,
    TemplateProbe,
    called,
)
from rayfin.deployments.text.repair import TemplateRules

SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER: dict[str, Any] = {"role": "user", "content": QUESTION}
SAID: dict[str, Any] = {"role": "assistant", "content": ANSWER}


def find_rules(probe: TemplateProbe, arguments_as_text: bool) -> TemplateRules:
    """Returns the rules of a template that renders a plain conversation; else those of none."""

    def refuses(*messages: dict[str, Any]) -> bool:
        return probe.write(messages) is None

    def asks(*calls: Any) -> dict[str, Any]:
        return called(calls, arguments_as_text, "")

    def gave(call: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "x"}

    if refuses(USER, SAID, USER):
        return TemplateRules()
    no_system = refuses(SYSTEM, USER)
    round_of_one = (USER, asks(FIRST), gave(FIRST))
    systems = ((SYSTEM, SYSTEM, USER), (USER, SAID, SYSTEM, USER), (USER, SYSTEM, USER))
    no_results = refuses(*round_of_one)
    round_of_two = (USER, asks(FIRST, SECOND), gave(FIRST), gave(SECOND))
    return TemplateRules(
        system_first=not no_system and any(refuses(*messages) for messages in systems),
        no_system=no_system,
        no_results=no_results,
        no_user_after_results=not no_results and refuses(*round_of_one, USER),
        alternates=refuses(USER, USER) or refuses(USER, SAID, USER, USER),
        one_call=not no_results and refuses(*round_of_two),
    )
