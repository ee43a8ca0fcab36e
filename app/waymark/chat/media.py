"""Parts of a content that are no text: images, videos, sounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Types of a part, by what a chat template sees of it.
MEDIA = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video": "video",
    "video_url": "video",
}


def kind_of(part: Any) -> str | None:
    """``image``, ``audio`` or ``video``; None if the part is none of them."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return MEDIA.get(kind) if isinstance(kind, str) else None


def has_media(messages: Sequence[Any]) -> bool:
    """Whether a part of a message is an image, a video or a sound."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    return any(kind_of(part) is not None for content in contents if isinstance(content, list) for part in content)
