"""Which known deviation explains the elements that are wrong."""

from moetail.conformance.diagnosis.search import (
    DEVIATIONS,
    MOST_TERMS,
    Diagnosis,
    diagnose,
    rule_named,
    simulate,
)

__all__ = ["DEVIATIONS", "MOST_TERMS", "Diagnosis", "diagnose", "rule_named", "simulate"]
