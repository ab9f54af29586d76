"""Engines of tiny networks compile as briefly as those of the rule model."""

from tests.quick_engines import quick_engines

__all__ = ["quick_engines"]
