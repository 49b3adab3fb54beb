"""Models on the hub: which ones a run reads, and their download into this machine's cache, with progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from flowtrain.config.run import RunConfig
from flowtrain.errors import ResourceError
from flowtrain.types.nodes import FetchState, HubModel

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configurations, tokenizers and processors. Never pickles (``*.bin``, ``*.pt``) and never code."""
_NOT_READ = ("*/*.safetensors",)
"""Copies of the weights in another form, as some repositories have in folders of their own."""
_PARTIAL = "*.incomplete"
"""Files of huggingface_hub's cache that are being downloaded."""


def hub_models(config: RunConfig, with_backbone: bool = True) -> tuple[HubModel, ...]:
    """Return the models that are no local directories. with_backbone: a resume does not read its first weights."""
    named = [("model.path", config.model.path, True), ("model.tokenizer", config.model.tokenizer, False)]
    sees = config.mode != "llm_only"
    named += [(f"encoders.{name}.path", encoder.path, sees) for name, encoder in config.encoders.items()]
    named += [("backbone.path", config.backbone.path, with_backbone)]
    found: dict[str, HubModel] = {}
    for key, path, has_weights in named:
        if path is None or Path(path).exists():
            continue
        known = found.get(path)
        if known is None or (has_weights and not known.has_weights):
            found[path] = HubModel(path, key, has_weights)
    return tuple(found.values())


def weights_snapshot(repo_id: str, local_files_only: bool = False) -> Path:
    """Return the cached folder with a model's weights; downloads what the cache lacks unless ``local_files_only``."""
    allowed, ignored = list(WEIGHTS), list(_NOT_READ)
    return Path(
        snapshot_download(repo_id, allow_patterns=allowed, ignore_patterns=ignored, local_files_only=local_files_only)
    )


class HubFetch:
    """Downloads models into this machine's cache; another thread may ask for the progress.

    Machines with one cache do not download a file twice: huggingface_hub locks each.
    """

    def __init__(self, models: Sequence[HubModel]) -> None:
        self._models = models
        self._files: Mapping[Path, int] = {}
        self._is_known = False

    def fetch(self) -> dict[str, str]:
        """Return the commit of each model, by its id. Raises ResourceError for one that cannot be had."""
        self._look()
        return {model.repo_id: self._fetch(model) for model in self._models}

    def lacking(self) -> tuple[int, str | None]:
        """Return how many bytes the cache lacks, and why models that it lacks cannot be had (None if they can)."""
        self._look()
        if self._is_known:
            state = self.state()
            return (state.total_nbytes or 0) - state.done_nbytes, None
        try:
            for model in self._models:
                _download(model, local_files_only=True)
        except LocalEntryNotFoundError as error:
            return 0, f"{model.key}: {model.repo_id!r} is not in the cache, and the hub does not answer ({error})"
        return 0, None

    def state(self) -> FetchState:
        """Return how far the download is, by the files' sizes on disk; other processes' parts of it count too."""
        done = sum(nbytes for file, nbytes in self._files.items() if file.exists())
        blobs = {file.parents[2] / "blobs" for file in self._files}
        partial = sum(_size(file) for folder in blobs for file in folder.glob(_PARTIAL))
        total = sum(self._files.values())
        return FetchState(min(done + partial, total), total if self._is_known else None)

    def _look(self) -> None:
        """Ask for the files and their sizes; without the hub the cache may still have everything."""
        try:
            found = [file for model in self._models for file in _download(model, dry_run=True)]
        except (OSError, HfHubHTTPError):
            return
        # At once, since another thread may be reading it.
        self._files = {Path(file.local_path): file.file_size or 0 for file in found}
        self._is_known = True

    def _fetch(self, model: HubModel) -> str:
        try:
            folder: str = _download(model)
        except (OSError, HfHubHTTPError) as error:
            raise ResourceError(f"{model.key}: {model.repo_id!r} cannot be fetched from the hub: {error}") from error
        return Path(folder).name


def _download(model: HubModel, **options: Any) -> Any:
    """Call ``snapshot_download`` for all files that a model's readers open."""
    patterns = (*SETTINGS, *WEIGHTS) if model.has_weights else SETTINGS
    return snapshot_download(model.repo_id, allow_patterns=list(patterns), ignore_patterns=list(_NOT_READ), **options)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0  # it is complete by now, and has another name
