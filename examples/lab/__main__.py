"""``python -m examples.lab``: what can be done with real clusters; the Makefile calls it."""

import sys

import typer

from examples.lab.demo import demo
from examples.lab.latency import latency
from examples.lab.parity import parity
from examples.lab.scale import scale
from examples.lab.throughput import throughput
from examples.lab.up import up

app = typer.Typer(
    help="Real Kubernetes clusters as plain processes on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(lambda: None)
app.command()(up)
app.command()(demo)
app.command()(parity)
app.command()(scale)
app.command()(latency)
app.command()(throughput)

if __name__ == "__main__":
    sys.exit(app())
