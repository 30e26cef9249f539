"""The hub of the federation: link, round loop, registry and dashboard."""

import os

# Flower reports its use to its makers unless told not to; this runs before any module imports it.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
