"""What the contract gives to others: a file to fill, and definitions for FlashInfer-Bench."""

import moetail.conformance.extra  # noqa: F401
