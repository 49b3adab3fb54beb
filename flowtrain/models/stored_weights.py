"""A model's first weights from a checkpoint's files, by their names in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from flowtrain.errors import ConfigError
from flowtrain.models.initial_weights import Index, InitialWeights
from flowtrain.models.stage import tied_names
from flowtrain.models.weight_files import WeightFiles

_COMPARED_ROWS = 4096


class StoredWeights:
    """Weights from safetensors files. Files are opened at the first read; only the requested parts are read.

    skeleton: the whole model on ``meta``, or a module that has its own names in the files.
    drawn: weights that the files may lack: unsaved buffers, and vocabulary rows from ``file_vocab_size`` on. None: only
        weights of ``state_dict()`` are read, and the files have them all.
    file_vocab_size: vocabulary rows of the files; None for a model without a vocabulary.
    module_name: turns a stored name into the module's own name; None for a weight of another module.

    Raises ConfigError if weights are missing or have another shape.
    """

    def __init__(
        self,
        open_files: Callable[[], WeightFiles],
        skeleton: nn.Module,
        drawn: InitialWeights | None,
        *,
        file_vocab_size: int | None,
        module_name: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self._open_files, self._skeleton, self._drawn = open_files, skeleton, drawn
        self._file_vocab_size, self._module_name = file_vocab_size, module_name
        self._shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        embeddings: tuple[nn.Module | None, ...] = ()
        if file_vocab_size is not None:
            assert isinstance(skeleton, PreTrainedModel), skeleton
            embeddings = (skeleton.get_input_embeddings(), skeleton.get_output_embeddings())
        may_grow = {parameter for module in embeddings if module is not None for parameter in module.parameters()}
        every_name = skeleton.named_parameters(remove_duplicate=False)
        self._may_grow = {name for name, parameter in every_name if parameter in may_grow}

    def read(self, name: str, index: Index) -> Tensor:
        """See ``InitialWeights``."""
        if name not in self._shapes:
            assert self._drawn is not None, name
            return self._drawn.read(name, index)
        stored_as, files = self._stored_names[name], self._files
        num_rows = files.shape(stored_as)[0] if index else 0
        if not index or index[0].stop <= num_rows:
            return files.read(stored_as, index)
        assert self._drawn is not None, name
        rows, rest = index[0], index[1:]
        added = self._drawn.read(name, (slice(max(rows.start, num_rows), rows.stop), *rest))
        if rows.start >= num_rows:
            return added
        return torch.cat([files.read(stored_as, (slice(rows.start, num_rows), *rest)), added])

    @cached_property
    def _files(self) -> WeightFiles:
        return self._open_files()

    def check(self) -> None:
        """Raise ConfigError if weights are missing or have another shape; only the files' headers are read."""
        self._matched(self._renamed())

    @cached_property
    def _stored_names(self) -> dict[str, str]:
        """Stored name of each tensor of the model; tied tensors may be stored under either name."""
        renamed = self._renamed()
        found = self._matched(renamed)
        for name, first in tied_names(self._skeleton).items():
            if name in renamed and first in renamed:
                self._check_equal(renamed[name], renamed[first])
        return found

    def _matched(self, renamed: Mapping[str, str]) -> dict[str, str]:
        """Add the names of tied tensors, and check that all tensors are there in the model's shapes."""
        found = dict(renamed)
        for name, first in tied_names(self._skeleton).items():
            either = found.get(first, found.get(name))
            if either is not None:
                found |= {name: either, first: either}
        missing = sorted(self._shapes.keys() - found.keys())
        if missing:
            raise ConfigError(
                f"{self._files.key}: {len(missing)} weights of {type(self._skeleton).__name__} are missing in "
                f"{self._files.path!r}, {missing[0]!r} first; is it the right kind of model?"
            )
        for name, stored_as in renamed.items():  # both copies of a tied tensor
            self._check_shape(name, stored_as)
        return found

    def _renamed(self) -> dict[str, str]:
        """Follow transformers' own renaming of older names, and of models with and without a head."""
        mapping: Sequence[object] = ()
        prefix: str | None = None
        if isinstance(self._skeleton, PreTrainedModel):
            mapping, prefix = get_model_conversion_mapping(self._skeleton), self._skeleton.base_model_prefix
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        state = self._skeleton.state_dict()
        found = {}
        for stored_as in self._files.names():
            own = self._module_name(stored_as)
            if own is None:
                continue
            name, converted_by = rename_source_key(own, renamings, converters, prefix, state)
            if converted_by is not None and name in state:
                raise ConfigError(
                    f"{self._files.key}: transformers puts {name} of {self._files.path!r} together from several "
                    "tensors, which FlowTrain does not; save the model again with save_original_format=False"
                )
            if name in state:
                found[name] = stored_as
        return found

    def _check_shape(self, name: str, stored_as: str) -> None:
        expected, found = self._shapes[name], self._files.shape(stored_as)
        grows = name in self._may_grow and self._file_vocab_size is not None
        before_growth = (self._file_vocab_size, *expected[1:]) if grows else tuple(expected)
        if tuple(found) in (tuple(expected), before_growth):
            return
        grown = ""
        if before_growth != tuple(expected):  # the grown number stands in no file of the user's
            grown = (
                f" by its vocab_size ({self._file_vocab_size}), which would grow to {expected[0]}, the tokenizer's "
                "length rounded up"
            )
        raise ConfigError(
            f"{self._files.key}: {stored_as} of {self._files.path!r} has shape {list(found)}, the model "
            f"{list(before_growth)}{grown}; correct its config.json, or give the weights that belong to it"
        )

    def _check_equal(self, stored_as: str, first_stored_as: str) -> None:
        """Check two stored copies of a tied weight: only one is read, so they must be equal."""
        files = self._files
        shapes = files.shape(stored_as), files.shape(first_stored_as)
        equal = shapes[0] == shapes[1]
        for start in range(0, shapes[0][0] if equal else 0, _COMPARED_ROWS):
            index = (slice(start, min(shapes[0][0], start + _COMPARED_ROWS)), *(slice(0, n) for n in shapes[0][1:]))
            equal = equal and torch.equal(files.read(stored_as, index), files.read(first_stored_as, index))
        if not equal:
            raise ConfigError(
                f"{files.key}: tie_word_embeddings of {files.path!r} is true, but {stored_as} and {first_stored_as} "
                "differ; set it to false in its config.json"
            )
