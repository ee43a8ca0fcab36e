"""The names that a client may send as a model."""

from __future__ import annotations

from waymark.store.directory import Directory


async def served_models(directory: Directory, tenant_id: str) -> list[tuple[str, str | None]]:
    """Models, aliases and adapters, each with the model that an adapter belongs to. Raises StoreUnavailable."""
    names: dict[str, str | None] = {}
    for each in await directory.registrations():
        if each.tenant_id == tenant_id and each.scope == "instance" and each.target.address is not None:
            names[each.model_name] = None
            for alias in each.target.aliases:
                names.setdefault(alias, None)
            for adapter in each.target.adapters:
                names.setdefault(adapter, each.model_name)
    return sorted(names.items())
