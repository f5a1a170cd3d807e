"""A model's processor, with the part for its kind of media and without the others."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rayfin.actors.config import EngineArgs

if TYPE_CHECKING:  # transformers takes seconds, and a server of text needs none of this
    from transformers.processing_utils import ProcessorMixin

PARTS = (
    "auto_map",
    "image_processor",
    "tokenizer",
    "video_processor",
    "feature_extractor",
    "audio_processor",
)
"""Settings of a processor's file that describe its parts."""


def assembled(
    args: EngineArgs,
    parts: Mapping[str, Any],
    own_class: Callable[[str | None], Any],
    default: str | None = None,
) -> "ProcessorMixin":
    """The class of processor that the model's folder names, with these ``parts`` and its tokenizer.

    Args:
        parts: by the names that classes have for them.
        own_class: gives a class in place of transformers' own, by its name; or None.
        default: the class's name where the folder names none.

    Raises:
        OSError, ValueError, ImportError, AttributeError, KeyError, TypeError: a file is missing, or
            transformers does not make a processor of it.
    """
    from transformers import AutoProcessor, AutoTokenizer  # noqa: F401
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.processing_utils import ProcessorMixin

    tokenizer = AutoTokenizer.from_pretrained(
        args.tokenizer or args.model,
        trust_remote_code=args.trust_remote_code,
        **args.tokenizer_hub,
    )
    settings, _ = ProcessorMixin.get_processor_dict(args.model, **args.hub)
    kind = settings.pop("processor_class", None)
    kind = kind or tokenizer.init_kwargs.get("processor_class") or default
    processor_class = own_class(kind) or (processor_class_from_name(kind) if kind else None)
    if processor_class is None:
        raise ValueError(f"it names no processor that transformers knows ({kind})")
    for name in PARTS:
        settings.pop(name, None)
    return _make(processor_class, {**parts, "tokenizer": tokenizer}, settings)


def _make(kind: Any, parts: dict[str, Any], settings: dict[str, Any]) -> "ProcessorMixin":
    class OfOneKind(kind):  # type: ignore[misc]
        """The model's processor without its checks for parts that this kind does not need."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

    # A class names the parts that it takes by the parameters of its constructor.
    return OfOneKind(**{name: parts.get(name) for name in kind.get_attributes()}, **settings)
