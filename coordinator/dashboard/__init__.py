"""The hub's web page, its JSON API and its metrics; mounted by ``coordinator.server``."""

from coordinator.dashboard.app import create_app

__all__ = ["create_app"]
