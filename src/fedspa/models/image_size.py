"""The one check that every network shares."""

from __future__ import annotations

from fedspa.errors import UserError


def check_image_size(model: str, image_size: int, smallest: int, reason: str) -> None:
    """Raise `UserError` for images (side in pixels) smaller than the network can take; `reason` says why."""
    if image_size < smallest:
        raise UserError(
            f"model={model} cannot take images of {image_size} x {image_size} pixels "
            f"(dataset.image_size={image_size}) because {reason}: the smallest that work are "
            f"{smallest} x {smallest}."
        )
