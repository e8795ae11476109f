"""``python -m moetail.conformance.cli``."""

from moetail.conformance.cli import main

main()
