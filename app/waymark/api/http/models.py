"""Bases of the models of bodies.

pydantic builds the validator of a model when it is first needed, not when a process starts. Most models only describe
answers, in the published contract, and are never validated.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, RootModel

T = TypeVar("T")


class Model(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(defer_build=True)


class Root(RootModel[T], Generic[T]):
    """A body other than an object."""

    model_config = ConfigDict(defer_build=True)
