"""Checks before anything starts: a bad folder, a model that is not served."""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import tokenizers

from rayfin.actors.buckets.folder import bucket_folder, is_bucket
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, RayfinError
from rayfin.actors.media.kinds import SPEECH_MODELS, model_media
from rayfin.actors.model_files.fast_tokenizer import chosen_class, chosen_name
from rayfin.actors.model_files.files import (
    end_token_ids,
    generation_config,
    model_json,
    read_object,
)
from rayfin.actors.model_files.gguf_folder import gguf_folder, is_gguf
from rayfin.actors.model_files.gguf_tokenizer import UNKNOWN
from rayfin.actors.model_files.plain_config import is_known_decoder
from rayfin.actors.model_files.pooling_folder import read_recipe
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.model_files.shards import require_safetensors
from rayfin.actors.plugins import CONTRACTS, plugins
from rayfin.actors.runner.parallel.rank import group_size
from rayfin.actors.timing import (
    HUB_PAUSE_SECONDS,
    HUB_SECONDS,
    HUB_TERMINAL_SECONDS,
    HUB_TRY_SECONDS,
)

if TYPE_CHECKING:  # which imports Ray, and an inline engine needs none
    from rayfin.deployments.serve.model_args import ModelArgs

logger = logging.getLogger(__name__)

RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where ``ray start`` says that this machine has a Ray."""

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""What a machine with a GPU has; the second within Windows."""

UNREACHED = {"ConnectError", "ProxyError"}
"""Errors of the HTTP libraries of huggingface_hub, which has had several, where no host answers.

Not "ConnectTimeout": a Hub that is slow to connect to is left to the load.
"""


def check_model(args: EngineArgs, *, tokenizer: bool = True) -> None:
    """Reads the model's configuration and tokenizer, not its weights.

    Raises:
        InvalidConfig, UnsupportedModel: the model cannot be served, and why.
    """
    for kind in CONTRACTS:
        plugins(args.plugin, kind)
    if any(name.startswith("format=") for name in args.plugin or ()):
        from rayfin.deployments.text.parsing.detect import Detected, with_plugins

        with_plugins(Detected(), args.plugin)
    require_hub(args)
    draft = args.draft_model
    if draft is not None:
        require_hub(draft)
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # one clear line at the end, not one for each retry
    local = located(args)
    _check_config(local, read_recipe(local))
    if args.load_format != "dummy" and not is_bucket(args.model):
        require_safetensors(local.model)
    _check_settings(args, local.model)
    if draft is not None:
        try:
            _check_config(draft)
        except RayfinError as error:
            raise InvalidConfig(
                f"speculative_config model: {error}", "speculative_config"
            ) from None
    speculation = args.speculation
    if speculation is not None and speculation.method in ("eagle", "eagle3"):
        # Here, for they import transformers' modelling code, which takes seconds.
        from rayfin.actors.runner.speculation.eagle import read_eagle
        from rayfin.actors.runner.speculation.eagle3 import read_settings
        from rayfin.actors.runner.speculation.head_folder import find_head

        read = read_eagle if speculation.method == "eagle" else read_settings
        read(find_head(str(speculation.model), args))
    if tokenizer:
        _check_tokenizer(args)


def _check_settings(args: EngineArgs, folder: str) -> None:
    """Refuses at once what a runner would refuse: it has to start for that.

    Raises:
        InvalidConfig: settings that do not go with the model's files or with this machine.
    """
    config = model_json(folder, "config.json", **args.hub)
    text = config.get("text_config")
    source = config.get("quantization_config")
    if source is None and isinstance(text, dict):
        source = text.get("quantization_config")
    if args.quantization in ("int8", "int4") and isinstance(source, dict):
        raise InvalidConfig(
            f"quantization {args.quantization!r} rounds plain weights, and {args.model} holds "
            f"quantized ones ({source.get('quant_method')}); leave it out, or 'dequantize' them",
            "quantization",
        )
    on_cpu = args.device == "cpu" or not _may_have_gpu()
    if args.activations == "fp8" and on_cpu:
        raise InvalidConfig("activations 'fp8' is for a GPU", "activations")
    if args.kv_cache_dtype.startswith("fp8") and args.attention in ("auto", "cpu") and on_cpu:
        raise InvalidConfig(
            f"kv_cache_dtype {args.kv_cache_dtype!r} needs a GPU, or attention 'torch', which is "
            "slow: the pages of the compiled attention are float32 or bfloat16",
            "kv_cache_dtype",
        )


def _may_have_gpu() -> bool:
    """Whether a runner may find a GPU: here, or on another node of a Ray that runs already."""
    joined = "RAY_ADDRESS" in os.environ or RAY_CLUSTER.exists()
    return joined or any(Path(path).exists() for path in GPU_FILES)


def check_audio(args: EngineArgs) -> None:
    """Logs that a model that hears is served for its text, where nothing decodes audio.

    Raises:
        InvalidConfig: it has no text to serve (Whisper).
    """
    local = located(args)
    if model_media(local) != "audio":
        return
    # Here, for it imports packages that other models do not need.
    from rayfin.deployments.media.sound import audio_off

    if (off := audio_off()) is not None:
        if model_json(local.model, "config.json", **local.hub).get("model_type") in SPEECH_MODELS:
            raise InvalidConfig(f"{args.model} writes down speech, and {off}", "model")
        logger.warning("%s hears, but audio is off: %s", args.model, off)


def _check_config(args: EngineArgs, recipe: PoolingRecipe | None = None) -> None:
    if not is_known_decoder(args):
        # Here, for it imports torch.
        from rayfin.actors.runner.models.config import load_config

        load_config(args, recipe)


def _check_tokenizer(args: EngineArgs) -> None:
    path = tokenizer_path(args)
    if (name := read_object(path, "tokenizer_config.json").get(UNKNOWN)) is not None:
        logger.warning(
            "%s says that its text is split as that of %r, which is not known: it is split as "
            "GPT-2's, and answers may be worse; --tokenizer names the original tokenizer",
            *(args.model, name),
        )
    generation_config(model_path(args.model, **args.hub), **args.hub)
    if args.trust_remote_code or chosen_name(path) is None:
        # Here, for it imports transformers.
        from rayfin.deployments.text.tokenizer import Tokenizer

        Tokenizer.load(path, args.trust_remote_code, ends=(), **args.tokenizer_hub)
        return
    try:
        tokenizers.Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
    except Exception as error:  # the package raises no narrower one
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"Cannot load a tokenizer from {path}: {reason}") from error


def needs_auto_classes(args: EngineArgs) -> bool:
    """Whether an ingress of the model imports transformers' auto classes, and with them torch."""
    known = is_known_decoder(located(args))
    return not known or chosen_class(tokenizer_path(args)) is None


def require_files(args: EngineArgs) -> None:
    """Looks at the small files of a model's folder and their names: what can be said at once.

    Raises:
        InvalidConfig: there is no such folder, it lacks config.json or weights, or settings do not
            go with it.
    """
    folder = Path(model_path(args.model, **args.hub))
    if folder.is_dir() and not (folder / "config.json").exists():
        raise InvalidConfig(f"{folder} holds no config.json", "model")
    if not folder.exists() and (folder.is_absolute() or args.model.startswith((".", "~"))):
        raise InvalidConfig(f"there is no folder {args.model}", "model")
    if args.load_format != "dummy" and not is_bucket(args.model):
        require_safetensors(str(folder))
    if folder.is_dir():
        _check_settings(args, str(folder))


def on_hub(name: str) -> bool:
    """Whether a model or tokenizer of that name is none of this machine's folders."""
    if is_gguf(name) or is_bucket(name):
        return False  # it becomes a folder
    path = Path(model_path(name))
    return not (path.exists() or path.is_absolute() or name.startswith((".", "~")))


def require_hub(args: EngineArgs) -> None:
    """Whether the Hub can be reached for a name that is neither a folder nor in the Hub's cache.

    huggingface_hub tries for half a minute, and again for each file that is looked for. A Hub
    that can be reached is left to those tries, however slow it is.

    Raises:
        InvalidConfig: it cannot be reached.
    """
    revisions = {args.model: args.revision}
    revisions.setdefault(args.tokenizer or args.model, args.tokenizer_hub["revision"])
    for name, revision in revisions.items():
        if on_hub(name) and not _cached(name, revision, args.download_dir):
            _reach(name, revision)


def _cached(name: str, revision: str | None, folder: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer_config.json", "tokenizer.json")
    try:
        return any(
            try_to_load_from_cache(name, file, cache_dir=folder, revision=revision)
            for file in files
        )
    except ValueError:  # no name of the Hub's; who loads it says so
        return True


def _reach(name: str, revision: str | None) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    endpoint = constants.ENDPOINT
    url = hf_hub_url(name, "config.json", revision=revision, endpoint=endpoint)
    # A pod's network may come seconds after the pod; who looks at a terminal has made an error.
    seconds = HUB_TERMINAL_SECONDS if sys.stderr.isatty() else HUB_SECONDS
    until = time.monotonic() + seconds
    while True:
        try:
            get_hf_file_metadata(url, timeout=HUB_TRY_SECONDS, endpoint=endpoint)
        except Exception as error:  # of whatever kind: who loads the model says what is wrong
            if not UNREACHED & {kind.__name__ for kind in type(error).__mro__}:
                return
            if time.monotonic() + HUB_PAUSE_SECONDS > until:
                raise InvalidConfig(
                    f"{name!r} is no folder, and {place(endpoint)} cannot be reached: {error}",
                    "model",
                ) from None
            time.sleep(HUB_PAUSE_SECONDS)
        else:
            return


def place(url: str) -> str:
    """Scheme, host and port of an address: without its user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class InBackground:
    """Runs ``check`` in a thread, beside what else has to start."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Waits for it.

        Raises:
            Exception: whatever ``check`` has raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._check()
        except Exception as error:
            self._error = error


def check_generation_config(word: str) -> None:
    """Whether the model's own sampling defaults hold: "auto" says so, "vllm" and "none" say no.

    Raises:
        InvalidConfig: another word that is no folder.
    """
    if word not in ("auto", "vllm", "none") and not Path(word).is_dir():
        raise InvalidConfig(
            f"generation_config must be 'auto', 'vllm', 'none' or a folder, got {word!r}",
            "generation_config",
        )


def require_room(models: "Sequence[ModelArgs]", cores: float) -> None:
    """Every runner has a core of its own, or Ray waits for one for ever.

    Args:
        cores: of all nodes, where no node will be added.

    Raises:
        InvalidConfig: there are too few.
    """
    runners = 0
    for model in models:
        least = model.server.min_engines
        engines = model.server.data_parallel_size if least is None else least
        runners += (engines + model.server.prefill_engines) * group_size(model.engine)
    if runners > cores:
        raise InvalidConfig(
            f"{runners} runners need a core each and there are {cores:g}: lower "
            "data_parallel_size, tensor_parallel_size or pipeline_parallel_size"
        )


# Where a model's name leads.

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"


def model_path(name: str, **hub: Any) -> str:
    """A folder or a Hugging Face name; ``demo`` is the toy model that Rayfin brings along.

    A GGUF file becomes a folder first, which takes a while; ``hub`` says where on the Hub one is.
    Of a bucket it is the folder of its small files on this node.
    """
    if is_bucket(name):
        return str(bucket_folder(name, weights=False))
    if is_gguf(name):
        return str(gguf_folder(name, **hub))
    return str(DEMO_FOLDER) if name == DEMO else name


def located(args: EngineArgs) -> EngineArgs:
    """The same with the places of model and tokenizer instead of their names."""
    tokenizer = args.tokenizer and model_path(args.tokenizer, **args.tokenizer_hub)
    return replace(args, model=model_path(args.model, **args.hub), tokenizer=tokenizer)


def read_template(value: str | None) -> str | None:
    """Returns a chat template that is given as text or as a file."""
    if value is not None and "{" not in value:
        return Path(value).read_text(encoding="utf-8")
    return value


def shipped(args: EngineArgs) -> EngineArgs:
    """The settings for engines, which may run on other nodes: there a bucket is read again."""
    return args if is_bucket(args.model) else located(args)


def generation_config_path(setting: str, args: EngineArgs) -> str | None:
    """Where generation_config.json is: the model's place, a folder, or None if it is not read."""
    if setting == "auto":
        return model_path(args.model, **args.hub)
    return None if setting in ("vllm", "none") else setting


def end_tokens(setting: str, changes: Mapping[str, Any] | None, args: EngineArgs) -> frozenset[int]:
    """The tokens that end an answer, besides the tokenizer's own.

    As in vLLM "vllm" and "none" leave out the model's sampling defaults alone.

    Args:
        setting, changes: ``generation_config`` and ``override_generation_config``.

    Raises:
        InvalidConfig: a file is not a JSON object.
    """
    place = generation_config_path(setting, args) or model_path(args.model, **args.hub)
    return end_token_ids({**generation_config(place, **args.hub), **(changes or {})})


def tokenizer_path(args: EngineArgs) -> str:
    """Where the tokenizer of an engine comes from."""
    if args.tokenizer:
        return model_path(args.tokenizer, **args.tokenizer_hub)
    return model_path(args.model, **args.hub)
