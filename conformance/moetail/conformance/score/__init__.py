"""What the suite itself is worth: the table of mutants, and the criteria of the field beside it."""

import moetail.conformance.extra  # noqa: F401
