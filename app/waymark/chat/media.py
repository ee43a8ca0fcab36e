"""Parts of a content other than text: images, videos, sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Type of a part -> its kind in a chat template.
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
    """Return ``image``, ``audio`` or ``video``; None for any other part."""
    kind = part.get("type") if isinstance(part, dict) else None
    return MEDIA.get(kind) if isinstance(kind, str) else None


def has_media(messages: Sequence[Any]) -> bool:
    """Return whether a part of a message is an image, a video or a sound."""
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return any(kind_of(part) is not None for content in contents if isinstance(content, list) for part in content)
