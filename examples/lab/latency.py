"""``python -m examples.lab latency``: prioritize against a Go extender that answers at once.

The Go extender is what most extenders are like: net/http, encoding/json and the types of
``k8s.io/kube-scheduler/extender/v1``. What it does not do is decide.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from agent.benchmark.latency import measure, report
from examples.lab.build import binaries
from examples.processes import ExampleError


@contextmanager
def extender() -> Iterator[str]:
    """Run the Go extender; its URL. Raises ExampleError where it does not start."""
    process = subprocess.Popen(
        [str(binaries() / "extender"), "-listen=127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise ExampleError("the Go extender ended at its start; see above")
            yield f"http://{address}"
        finally:
            process.kill()


def latency(
    requests: Annotated[int, typer.Option(min=10, help="Requests to each, a round.")] = 500,
    candidates: Annotated[int, typer.Option(min=2, help="Nodes in each request.")] = 500,
    training: Annotated[bool, typer.Option(help="Train in another process meanwhile.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the median one counts.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time a prioritize answer against a Go extender that answers at once."""
    with extender() as url:
        found = measure(requests, candidates, training, rounds, against=url)
    report(found, training, as_json)
