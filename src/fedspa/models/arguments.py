"""Facts of the data set that the maker of a network takes, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {
    "input_shape": ("input_shape",),
    "channels": ("channels", "in_channels", "in_chans", "input_channels", "num_channels"),
    "image_size": ("image_size", "img_size", "input_size", "size"),
    "features": ("features", "in_features", "num_features", "n_features"),
    "vocabulary": ("vocabulary", "vocabulary_size", "vocab_size", "num_embeddings", "num_tokens"),
    "length": ("length", "sequence_length", "seq_len", "max_length"),
    "outputs": ("outputs", "num_outputs", "classes", "num_classes", "n_classes", "out_features"),
}
"""The parameters' names for each fact in `Source.model_facts`."""


def data_arguments(facts: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a maker with these parameters takes, by the names of its parameters."""
    return {name: facts[fact] for fact in facts for name in NAMES[fact] if name in parameters}


def needed_fact(facts: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """The first parameter without a default that the data set has no fact for, such as channels; None if there is
    none."""
    return next(
        (
            name
            for fact, names in NAMES.items()
            for name in names
            if fact not in facts and name in parameters and parameters[name].default is parameters[name].empty
        ),
        None,
    )
