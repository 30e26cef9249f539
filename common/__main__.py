"""``python -m common``: the ``fedsched`` command where its script is not on the path."""

from common.cli import main

main()
