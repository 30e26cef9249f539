"""The suites by name, their data beside this file; ``agent.benchmark`` loads one when asked to."""

from importlib import import_module
from pathlib import Path

from agent.benchmark.suite import Suite

SUITES = {
    "mixed-nodes": "agent.benchmark.mixed_nodes:MixedNodes",
    "scale": "agent.benchmark.scale:Scale",
    "drl-mls": "agent.benchmark.drl_mls:DrlMls",
    "fragmentation": "agent.benchmark.fragmentation:Fragmentation",
    "batch-queue": "agent.benchmark.batch_queue:BatchQueue",
    "federation": "agent.benchmark.federation:Federation",
}
"""``module:class`` by name; a class is called without arguments."""
HELP = {
    "mixed-nodes": "Nine nodes of three GPU types: order, defer and place, and place only.",
    "scale": "The same weights on 9 to 1,200 nodes, and what decisions cost there.",
    "drl-mls": "Batches on shared GPUs against rules and plain learners; what each part is worth.",
    "fragmentation": "Shared GPUs filled to the brim, against FGD and others.",
    "batch-queue": "Orders of a supercomputer's queue, by bounded slow-down.",
    "federation": "Members alone and federated, a newcomer, a poisoned one.",
}
"""What each compares, for the command line."""


def load_suite(name: str) -> Suite:
    """The suite of that name, or of the class that ``module:class`` names."""
    module, _, attribute = SUITES.get(name, name).partition(":")
    suite: Suite = getattr(import_module(module), attribute)()
    return suite


def reference(suite: Suite) -> str:
    """What :func:`load_suite` makes another such suite from, in whatever process."""
    return f"{type(suite).__module__}:{type(suite).__qualname__}"


def data_file(name: str) -> Path:
    """The file that says what a suite runs."""
    return Path(__file__).with_name(f"{name}.yaml")
